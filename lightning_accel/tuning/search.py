"""The search for a faster variant of a run: each change alone, the winners together, each left out again, the proof."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from lightning_accel.tuning.choices import Goal
from lightning_accel.tuning.comparison import Shares
from lightning_accel.tuning.factors import Factor, Refusal, factors_for, float8_for, sparsity_for
from lightning_accel.tuning.latencies import Latency, latency_factors_for
from lightning_accel.tuning.learning import learning_changes_for
from lightning_accel.tuning.measurer import Measurer
from lightning_accel.tuning.outcome import LEAST_SPEED, USELESS, Outcome, names_of, needed_of_two, together
from lightning_accel.tuning.parity import Verdict
from lightning_accel.tuning.project import Changes, Project
from lightning_accel.tuning.savings import savings_for

_EXACT = ("equal", "exact")  # kinds of changes whose losses are equal up to rounding
# shares of the budget after which no such measurement begins
_UNTIL_ALONE, _UNTIL_TOGETHER, _UNTIL_ADDED = 0.45, 0.6, 0.65
_UNTIL_FIRST = 0.7  # of changes alone as long as none is faster: there is nothing to measure together or to compare
_NOTABLY = 1.02  # more, for which another change is tried in the place of a simpler one
_PROMISING = 0.9  # a change that is slower alone may be faster beside others, but hardly one that is slower by more


class Search:
    """Find a faster variant of a project within a time.

    Args:
        project: what is tuned.
        folder: where measurements and the files of trials are written; a search that was killed goes on from there.
        budget: seconds for everything.
        identity: plain values that tell this project on this machine from others.
        goal: ``speed``; ``memory``: the least whose run takes at most 1 / ``LEAST_SPEED`` times as long; or ``latency``
            of a project that serves.
        allow: names of changes of what is learned, which are tried as well.
        progress: called with what is being done, the share of the budget that has passed, and the best factor so far.

    Raises:
        ValueError: if the folder holds measurements of another project.
    """

    def __init__(
        self,
        project: Project,
        folder: Path,
        budget: float,
        identity: dict[str, Any],
        goal: Goal = "speed",
        allow: Sequence[str] = (),
        progress: Callable[[str, float, float], None] = lambda what, share, best: None,
    ) -> None:
        self.measurer = Measurer(project, folder, budget, identity, goal, progress)
        self.outcome = Outcome(goal=goal)
        self._allow = allow
        self._tried: list[Factor] = []

    def run(self) -> Outcome:
        """Return the outcome; whatever ends it, :attr:`outcome` holds what was found so far.

        Raises:
            TrialError: if the run does not work as it is given.
        """
        try:
            self._begin()
            winners = self._leave_time_to_prove(self._try_alone())
            chosen = self._try_together(winners) if len(winners) > 1 else winners
            if self.outcome.goal != "memory":
                chosen = self._try_undecided(self._try_added(self._try_rivals(chosen)))
            self._prove(chosen)
        except (KeyboardInterrupt, OSError):  # such as that of a disk too full for the journal
            self._hand_back_best()
            raise
        finally:
            self.measurer.stop()
            self.outcome.seconds = self.measurer.seconds
        return self.outcome

    def _begin(self) -> None:
        """Measure the run as it is."""
        self.measurer.measure_baseline()
        baseline = self.measurer.baseline
        self.outcome.facts = baseline["facts"]
        self.outcome.steps_per_second = baseline["rate"]
        self.outcome.peak_bytes = max(baseline["peaks"], default=0)
        if baseline["latency"]:
            self.outcome.latency = Latency(**baseline["latency"])

    def _try_alone(self) -> list[Factor]:
        """Return the best factor of each group of those that are faster than the baseline, the most effective first."""
        for factor in _candidates(self.outcome.goal, self.measurer.baseline, self._allow):
            if isinstance(factor, Refusal):
                self.outcome.refused.append(factor)
                continue
            has_won = any(found.wins for found in self.outcome.alone.values())
            if not self.measurer.may_begin(f"alone {factor.name}", _UNTIL_ALONE if has_won else _UNTIL_FIRST):
                self.outcome.refused.append(Refusal(factor.name, "the budget did not suffice"))
                continue
            if reason := self.measurer.why_no_room(factor):
                self.outcome.refused.append(Refusal(factor.name, reason))
                continue
            found = self.measurer.measure(f"alone {factor.name}", Changes(), factor.changes, most=8)
            self._tried.append(factor)
            self.outcome.alone[factor.name] = found
            if found.wins:
                self.measurer.best = max(self.measurer.best, found.gain)
        best = [self._best_of(self._winners_of(group)) for group in dict.fromkeys(one.group for one in self._tried)]
        return sorted(filter(None, best), key=lambda one: -self.outcome.alone[one.name].gain)

    def _winners_of(self, group: str) -> list[Factor]:
        return [one for one in self._tried if one.group == group and self.outcome.alone[one.name].wins]

    def _best_of(self, factors: Sequence[Factor]) -> Factor | None:
        """Return the simplest of those that gain as much as any, as far as intervals tell; None of none."""
        gains = [self.outcome.alone[one.name].gain_interval for one in factors]
        least = max((low for low, _ in gains), default=0.0)
        return next((one for one, (_, high) in zip(factors, gains, strict=True) if high >= least), None)

    def _leave_time_to_prove(self, chosen: list[Factor]) -> list[Factor]:
        """Return the changes that there is time to prove together: without slow starters, or the least effective."""
        chosen = list(chosen)
        while len(chosen) > 1:
            # together, and then without one of them, or without two before the share of the budget ends that
            num_turns = 16 + 12 * min(len(chosen) - 1, 2)
            if self._may_prove(f"together {names_of(chosen)}", chosen, num_turns):
                break
            starts = {one.name: self.outcome.alone[one.name].start_seconds for one in chosen}
            slowest = max(chosen, key=lambda one: starts[one.name])
            dropped, reason = chosen[-1], "the budget did not suffice to prove it beside the others"
            if starts[slowest.name] >= 2 * min(starts.values()):
                dropped = slowest
                reason = f"the budget did not suffice to prove it: it starts for {starts[slowest.name]:.0f} s each time"
            self.outcome.refused.append(Refusal(dropped.name, reason))
            chosen.remove(dropped)
        return chosen

    def _may_prove(self, name: str, changes: Sequence[Factor], num_turns: int = 16) -> bool:
        start_seconds = max(self.outcome.alone[one.name].start_seconds for one in changes)
        return self.measurer.may_prove(name, changes, start_seconds, num_turns)

    def _try_together(self, winners: list[Factor]) -> list[Factor]:
        """Return the winners without those that the others make useless; or the best alone if they do not add up."""
        chosen = list(winners)
        while len(chosen) > 1:
            found = self.measurer.measure(f"together {names_of(chosen)}", Changes(), together(chosen), most=8)
            if found.ratio is not None and (found.saving is None or found.over_run >= LEAST_SPEED):
                self.measurer.best = max(self.measurer.best, found.gain)
                break
            self.measurer.forget(together(chosen))
            chosen.pop()  # they cannot work together, or not at a bearable speed: without the least effective
        for factor in reversed(winners):
            others = [other for other in chosen if other is not factor]
            name = f"without {factor.name} of {names_of(chosen)}"
            if not others or factor not in chosen or not self.measurer.may_begin(name, _UNTIL_TOGETHER):
                continue
            known = needed_of_two(found, self.outcome.alone[others[0].name]) if len(winners) == 2 else None
            result = known or self.measurer.measure(name, together(chosen), together(others), most=8)
            self.outcome.without[factor.name] = result
            is_useless = result.ratio is not None and (result.saving or result.ratio.value) > USELESS
            chosen = self._choose(others, chosen, is_useless)
        return chosen

    def _try_rivals(self, chosen: list[Factor]) -> list[Factor]:
        """Return the chosen changes, each as the one of its group that gained more alone if it is faster in its place.

        The simplest of those whose intervals alone overlap was chosen, and turns against each other tell more.
        """
        for factor in list(chosen):
            rivals = [one for one in self._winners_of(factor.group) if one.kind != "learned"]
            gains = {one.name: self.outcome.alone[one.name].gain for one in rivals}
            rival = max(rivals, key=lambda one: gains[one.name], default=factor)
            changed = [rival if one is factor else one for one in chosen]
            name = f"{rival.name} in place of {factor.name} of {names_of(chosen)}"
            is_affordable = self.measurer.may_begin(name, _UNTIL_ADDED) and self._may_prove(name, changed)
            if rival is factor or not is_affordable or gains[rival.name] < _NOTABLY * gains[factor.name]:
                continue
            found = self.measurer.measure(
                name, together(chosen), together(changed), most=16, width=0.03, has_to_pay=True
            )
            self.outcome.added[f"{rival.name} in place of {factor.name}"] = found
            chosen = self._choose(changed, chosen, found.wins)
        return chosen

    def _try_added(self, chosen: list[Factor]) -> list[Factor]:
        """Return the chosen changes and those others, not faster alone, with which they are faster still."""
        promising = [
            one
            for one in self._tried
            if one.kind != "learned" and (ratio := self.outcome.alone[one.name].ratio) and ratio.high > _PROMISING
        ]
        for factor in sorted(promising, key=lambda one: -self.outcome.alone[one.name].gain):
            name = f"{factor.name} beside {names_of(chosen)}"
            is_affordable = self.measurer.may_begin(name, _UNTIL_ADDED) and self._may_prove(name, [*chosen, factor])
            if not chosen or factor.group in {one.group for one in chosen} or not is_affordable:
                continue
            found = self.measurer.measure(name, together(chosen), together([*chosen, factor]), most=8, has_to_pay=True)
            self.outcome.added[factor.name] = found
            chosen = self._choose([*chosen, factor], chosen, found.wins)
        return chosen

    def _try_undecided(self, chosen: list[Factor]) -> list[Factor]:
        """Return the chosen changes with exact ones that intervals leave undecided, if these are faster all together.

        Gains of some percent are within the noise of the turns that each has alone, and their sum is not. Losses of
        seeds are not compared for so little.
        """
        measured = self.outcome.added if chosen else self.outcome.alone
        groups = {one.group for one in chosen}
        best: dict[str, Factor] = {}
        for one in self._tried:
            found = measured.get(one.name)
            if (
                one.kind not in (*_EXACT, "checked")
                or one.group in groups
                or not found
                or found.wins
                or found.over_run <= 1
            ):
                continue
            if one.group not in best or found.over_run > measured[best[one.group].name].over_run:
                best[one.group] = one
        undecided = list(best.values())
        name = f"undecided {names_of(undecided)} beside {names_of(chosen)}"
        changed = [*chosen, *undecided]
        if not undecided or not self.measurer.may_begin(name, _UNTIL_ADDED) or not self._may_prove(name, changed):
            return chosen
        found = self.measurer.measure(name, together(chosen), together(changed), most=24, width=0.02, has_to_pay=True)
        self.outcome.added[names_of(undecided)] = found
        return self._choose(changed, chosen, found.wins)

    def _choose(self, changed: list[Factor], chosen: list[Factor], is_better: bool) -> list[Factor]:
        """Return the better of two sets of changes; end the other's variant, and keep this one for what follows."""
        better, other = (changed, chosen) if is_better else (chosen, changed)
        self.measurer.forget(together(other))
        return better

    def _prove(self, chosen: list[Factor]) -> None:
        """Drop what changes losses, then measure what remains until its interval is narrow."""
        chosen = self._drop_changed(self._judge_exact(self._settle_learned(chosen)))
        checked = ", ".join(factor.name for factor in chosen if factor.kind == "checked")
        if checked:
            reason = f"{checked}: before it trains, the run compares losses and gradients with those as they were"
            self.outcome.verdicts.insert(0, Verdict(True, reason))
        self.outcome.verdicts = list(dict.fromkeys(self.outcome.verdicts))
        self.outcome.chosen = chosen
        if chosen:
            self.outcome.proof = self.measurer.measure(
                f"proof {names_of(chosen)}", Changes(), together(chosen), least=8, most=40, width=0.03
            )

    def _settle_learned(self, chosen: list[Factor]) -> list[Factor]:
        """Return the changes, those of what is learned as the best of their groups whose losses are equivalent."""
        settled = []
        for factor in chosen:
            if factor.kind != "learned":
                settled.append(factor)
                continue
            group = self._winners_of(factor.group)
            while (best := self._best_of(group)) and not self._agree([best], exactly=False):
                group.remove(best)
            settled += [best] if best else []
        return settled

    def _judge_exact(self, chosen: list[Factor]) -> list[Factor]:
        """Return the changes; exact ones whose losses deviate count as ``random``: other layouts draw otherwise."""
        exact = [factor for factor in chosen if factor.kind in _EXACT]
        if not exact or self._agree(exact, exactly=True):
            return chosen
        alone = exact if len(exact) == 1 else [one for one in exact if not self._agree([one], exactly=True)]
        deviating = alone or exact[-1:]  # the least effective, if they deviate together alone
        chosen = [one for one in chosen if one not in deviating or one.kind == "exact"]
        chosen = [replace(one, kind="random") if one in deviating else one for one in chosen]
        return chosen if alone else self._judge_exact(chosen)

    def _drop_changed(self, chosen: list[Factor]) -> list[Factor]:
        """Return the changes without those that make a run learn otherwise, together or alone."""
        while inexact := [factor for factor in chosen if factor.kind not in (*_EXACT, "checked")]:
            if self._agree(chosen, exactly=False):
                break
            alone = inexact if len(inexact) == 1 else [one for one in inexact if not self._agree([one], exactly=False)]
            dropped = alone or inexact[-1:]  # the least effective, if they deviate together alone
            chosen = [factor for factor in chosen if factor not in dropped]
        return chosen

    def _hand_back_best(self) -> None:
        """Choose the best change alone, unless all were measured together already."""
        faster = [one for one in self._tried if one.kind != "learned" and self.outcome.alone[one.name].wins]
        if self.outcome.proof is not None or not faster:
            return
        fastest = max(faster, key=lambda one: self.outcome.alone[one.name].gain)
        best = self._best_of(self._winners_of(fastest.group)) or fastest
        self.outcome.chosen = [best]
        self.outcome.proof = self.outcome.alone[best.name]
        self.outcome.is_compared = False
        self.outcome.verdicts.append(Verdict(False, f"{best.name}: interrupted before what it computes was compared"))

    def _agree(self, factors: Sequence[Factor], exactly: bool) -> bool:
        """Return whether losses with changes are equal up to rounding, or equivalent over seeds."""
        self.outcome.verdicts.append(self.measurer.judge(factors, exactly))
        return self.outcome.verdicts[-1].passed


def _candidates(goal: Goal, baseline: Mapping[str, Any], allow: Sequence[str]) -> Iterable[Factor | Refusal]:
    facts = baseline["facts"]
    if goal == "memory":
        return savings_for(facts)
    if goal == "latency":
        return latency_factors_for(facts)
    return chain(
        learning_changes_for(facts, allow),
        factors_for(facts, Shares(**baseline["shares"])),
        float8_for(facts, allow),
        sparsity_for(facts, allow),
    )
