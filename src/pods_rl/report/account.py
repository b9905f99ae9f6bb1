"""The account of a comparison: everything that a report says, computed once.

The page, Markdown, the terminal and the figures for print each format an account. None of them computes a number,
chooses a reference, or decides whether a difference is settled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .analysis import Analysis, analyse
from .arms import Arm
from .charts import Chart, Styles, charts, styles_of
from .ledger import Ledger, ledger_of
from .notes import method, notes
from .tables import Table, tables
from .wording import details, opening


@dataclass(frozen=True, eq=False)
class Account:
    """The content of a report. If no run has begun, it has only a title and one sentence that opens it."""

    title: str
    opening: tuple[str, ...]  # plain sentences: of each pair of arms that shows one thing, the difference of scores
    details: tuple[str, ...] = ()  # a pair that differs in more, how many times faster, and the cost of a step
    notes: tuple[str, ...] = ()  # what limits the numbers
    method: tuple[str, ...] = ()  # how the numbers were computed
    tables: Mapping[str, Table] = field(default_factory=dict)  # by name, in the order of the page
    charts: Mapping[str, Sequence[Chart]] = field(default_factory=dict)
    styles: Styles = field(default_factory=dict)  # of each arm in every figure
    ledger: Ledger = field(default_factory=Ledger)
    analysis: Analysis | None = None  # the numbers


def account_of(
    arms: Sequence[Arm],
    *,
    title: str,
    baseline: str,
    metric: str,
    rollouts_mb: float,
    first_notes: Sequence[str] = (),
    shows: Mapping[str, str] | None = None,
) -> Account:
    """Compare arms and return what a report says of them; arguments as of `analyse` and `ledger_of`.

    ``first_notes`` come before the notes that the numbers give.
    """
    analysis = analyse(arms, baseline=baseline, metric=metric, shows=shows)
    styles = styles_of(analysis)
    colours = {arm.label: styles[arm.name].colour for arm in analysis.arms}
    ledger = ledger_of(analysis.arms, data_mb=rollouts_mb, colours=colours)
    return Account(
        title=title,
        opening=opening(analysis),
        details=details(analysis),
        notes=(*first_notes, *notes(analysis, ledger)),
        method=method(analysis),
        tables=tables(analysis),
        charts=charts(analysis, styles),
        styles=styles,
        ledger=ledger,
        analysis=analysis,
    )
