"""The images of prompts, as `generate` encodes them before the first token: which rows have the same, and a selection.

In recent versions of transformers `generate` replaces pixels by the features of all images of a batch, in the order of
their placeholders in the rows. Their form differs from model to model; what is read here is what `generate` itself
reads where it repeats a batch for several sequences of a prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from .cache import CannotServeError

ENCODED = "mm_encoder_outputs"  # the argument of a model that holds the features


class Images:
    """The features of the images of a batch.

    Args:
        features: of the model's argument `mm_encoder_outputs`: one entry of `pooler_output` for each part of an image.
        placeholders: the number of tokens of each row that stand for a part of an image's features.

    Raises:
        CannotServeError: the entries do not fit the rows.

    >>> from types import SimpleNamespace
    >>> parts = torch.tensor([1.0, 2.0, 1.0, 2.0]).view(4, 1, 1).expand(4, 3, 5)  # 4 parts of 3 tokens
    >>> images = Images(SimpleNamespace(pooler_output=parts), [6, 0, 6])
    >>> images.are_equal(0, 2), images.are_equal(0, 1)
    (True, False)
    >>> images.of_rows([2]).pooler_output[:, 0, 0]
    tensor([1., 2.])
    """

    def __init__(self, features: Any, placeholders: Sequence[int]) -> None:
        self._features = features
        parts: Any = getattr(features, "pooler_output", None)
        deep = getattr(features, "deepstack_features", None) or ()
        by_part = isinstance(parts, Tensor | list | tuple) and all(len(layer) == len(parts) for layer in deep)
        if not by_part:
            raise CannotServeError("the features of its images are not in one list")
        # The features are in the order of the rows' placeholders: each row's must end where a part ends.
        ends = {end: part + 1 for part, end in enumerate(accumulate(len(part) for part in parts))}
        ends[0] = 0
        borders = [0, *accumulate(placeholders)]  # in tokens
        if not ends.keys() >= set(borders) or max(ends) != borders[-1]:
            raise CannotServeError("the features of its images do not follow the rows")
        borders = [ends[border] for border in borders]
        self._parts = [range(*pair) for pair in pairwise(borders)]  # of each row

    def are_equal(self, row: int, other: int) -> bool:
        """Return whether two rows have the same images: features that are equal bit by bit."""
        if len(self._parts[row]) != len(self._parts[other]):
            return False
        parts = self._features.pooler_output
        pairs = zip(self._parts[row], self._parts[other], strict=True)
        return all(torch.equal(parts[first], parts[second]) for first, second in pairs)

    def of_rows(self, rows: Sequence[int]) -> Any:
        """Return the features of some rows' images, in the order of these rows."""
        chosen = [part for row in rows for part in self._parts[row]]
        selected = copy.copy(self._features)
        selected.pooler_output = _select_images(self._features.pooler_output, chosen)
        deep = getattr(self._features, "deepstack_features", None)
        if deep is not None:
            selected.deepstack_features = [_select_images(layer, chosen) for layer in deep]
        return selected


def _select_images(parts: Any, chosen: list[int]) -> Any:
    return parts[chosen] if isinstance(parts, Tensor) else [parts[part] for part in chosen]


def images_of(config: Any, input_ids: Tensor, encoded: Any) -> Images | None:
    """Return the images of prompts `[rows, W]`, of which `generate` encoded these features; None if there are none."""
    features_of = {kind: features for kind, features in (encoded or {}).items() if features is not None}
    if not features_of:
        return None
    placeholder = getattr(config, "image_token_id", None)
    if set(features_of) != {"image"} or placeholder is None:
        kinds = ", ".join(sorted(features_of))
        raise CannotServeError(f"its prompts have {kinds} features that cannot be told apart by row")
    return Images(features_of["image"], (input_ids == placeholder).sum(1).tolist())
