"""How the parts of a policy are computed, over prefix trees or by rows, tried with its own weights."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from ..engines.trl.compat import add_fused_lm_head
from ..loading.folders import find_policy
from ..loading.policy import load_options
from ..prefix_tree.decoding import try_generation
from ..prefix_tree.packing import probe_trees
from ..recipe import Recipe


def describe_trees(recipe: Recipe) -> list[tuple[str, str]]:
    """Return (part, how it is computed) for generation and the update of a recipe's policy, without its adapter.

    Loads the policy as training does, generates two tokens and computes a small tree.
    """
    values = recipe.every_value()
    if values["exact_trl"] or not values["prefix_tree"]:
        off = "rows: set prefix_tree to true and exact_trl to false to compute trees"
        return [("generation", off), ("update", off)]
    # The model is an instance of the class that its configuration names.
    policy = find_policy(recipe.values["model_name_or_path"], revision=recipe.values.get("model_revision") or "main")
    config = AutoConfig.from_pretrained(policy.model, trust_remote_code=False)
    architecture = (config.architectures or [""])[0]
    model_class = getattr(transformers, architecture, AutoModelForCausalLM)
    options = load_options(recipe) | {"revision": None}  # the files are local
    model = model_class.from_pretrained(policy.model, use_safetensors=True, **options)
    if options.get("quantization_config") is None:
        model = model.to("cuda" if torch.cuda.is_available() and not recipe.values.get("use_cpu") else "cpu")
    generation = try_generation(model)
    add_fused_lm_head(model.train())
    # how far a tree may be from its rows by rounding, as in training
    tolerance = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1
    update = probe_trees(model, model, tolerance=tolerance)
    return [("generation", generation), ("update", str(update))]
