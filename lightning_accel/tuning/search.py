"""The search for a faster variant of a run: each change alone, the winners together, each left out again, the proof."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from lightning_accel.tuning.choices import Goal
from lightning_accel.tuning.comparison import compare, steps_per_second
from lightning_accel.tuning.factors import Factor, Refusal, factors_for, float8_for
from lightning_accel.tuning.identity import distributions_of, require_same, state_of
from lightning_accel.tuning.journal import Journal
from lightning_accel.tuning.latencies import Latency, LatencyRate, latency_factors_for
from lightning_accel.tuning.learning import BATCH_SIZE_FACTORS, learning_changes_for, samples_per_step
from lightning_accel.tuning.outcome import LEAST_SPEED, USELESS, Measurement, Outcome, needed_of_two, together
from lightning_accel.tuning.outputs import OutputComparison, Outputs, record_outputs
from lightning_accel.tuning.parity import LOOKS, Losses, Verdict, are_equal, are_equivalent, record_losses
from lightning_accel.tuning.planned_run import PlannedRun
from lightning_accel.tuning.project import Changes, Project
from lightning_accel.tuning.savings import prove_saving, saving_of, savings_for
from lightning_accel.tuning.serving import NUM_SAMPLES
from lightning_accel.tuning.variant import DiskFullError, NotReadyError, TrialError, Variant
from lightning_accel.tuning.variants import Variants

_EXACT = ("equal", "exact")  # kinds of changes whose losses are equal up to rounding
_EXACT_STEPS = 10
# by rounding alone, runs from equal seeds grow apart, and after more steps may differ as much as seeds do
_MOST_STEPS = 30
_SHARE_OF_FIVE = 0.05  # of the budget, for those of five seeds
# shares of the budget after which no such measurement begins
_UNTIL_ALONE, _UNTIL_TOGETHER, _UNTIL_ADDED = 0.45, 0.6, 0.65
_END = 0.99  # share of the budget, after which the last turn and the end of all processes come
_BEFORE_PROOF = 0.9  # share of the budget after which no comparison goes on, since nothing is handed back without proof
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
        self.project = project
        self.folder = folder
        self.budget = budget
        self.progress = progress
        self._allow = allow
        self.outcome = Outcome(goal=goal)
        self.journal = Journal(folder / "journal.jsonl", identity, budget)
        self._begin = time.monotonic() - self.journal.seconds
        self._best = 1.0
        self._tried: list[Factor] = []
        self._turn = 1.0
        self._outputs = OutputComparison(self._record_outputs)
        self._variants = Variants(project, folder / "trials")

    def run(self) -> Outcome:
        """Return the outcome; whatever ends it, :attr:`outcome` holds what was found so far.

        Raises:
            TrialError: if the run does not work as it is given.
        """
        try:
            self._measure_baseline()
            winners = self._try_alone()
            chosen = self._try_together(winners) if len(winners) > 1 else winners
            if self.outcome.goal != "memory":
                chosen = self._try_undecided(self._try_added(self._try_rivals(chosen)))
            self._prove(chosen)
        except (KeyboardInterrupt, OSError):  # such as that of a disk too full for the journal
            self._hand_back_best()
            raise
        finally:
            self._variants.stop()
            self.outcome.seconds = time.monotonic() - self._begin
        return self.outcome

    def _measure_baseline(self) -> None:
        def measure() -> tuple[dict[str, Any], float | None]:
            begin = time.monotonic()
            try:
                baseline, start_seconds = self._warm_variant("the run as it is", Changes(), self._deadline(1.0))
            except NotReadyError as error:
                raise NotReadyError(
                    f"the run as it is has not trained a few steps within the budget of {self.budget:g} s: give more, "
                    f"such as the default, 10m ({error})"
                ) from error
            steps = baseline.run_for(2.0, self._deadline(1.0))
            facts = baseline.facts()
            if reason := facts.pop("bad_loss", ""):
                raise TrialError(f"in the first step of the run as it is, {reason}")
            code = facts.pop("code")
            return {
                "facts": facts,
                "code": state_of(code["files"], distributions_of(code["packages"])),
                "rate": steps_per_second(steps),
                "latency": asdict(Latency.of(steps)) if self.project.serves else None,
                "peaks": list(baseline.peak_bytes().values()),
                "waited": sum(step.waited for step in steps) / sum(step.end - step.begin for step in steps),
                "start_seconds": start_seconds,
                "seconds": time.monotonic() - begin,
            }, None

        self._baseline = self.journal.result("baseline", measure)
        code = self._baseline["code"]
        require_same(code, state_of(*code.values()), self.folder)
        self.outcome.facts = self._baseline["facts"]
        self._planned = PlannedRun(
            self._baseline["facts"]["planned_steps"],
            self._baseline["rate"],
            self._baseline["start_seconds"],
            least_speed=LEAST_SPEED if self.outcome.goal == "memory" else 1.0,
        )
        self.outcome.steps_per_second = self._baseline["rate"]
        self.outcome.peak_bytes = max(self._baseline["peaks"], default=0)
        if self.project.serves:
            self.outcome.latency = Latency(**self._baseline["latency"])
        enough = (NUM_SAMPLES if self.project.serves else 5) / self._baseline["rate"]
        self._turn = min(5.0, max(0.5, self.budget / 600, enough))  # longer ones are told apart better

    def _try_alone(self) -> list[Factor]:
        """Return the best factor of each group of those that are faster than the baseline, the most effective first."""
        for factor in _candidates(self.outcome.goal, self._baseline, self._allow):
            if isinstance(factor, Refusal):
                self.outcome.refused.append(factor)
                continue
            if f"alone {factor.name}" not in self.journal and self._passed() > _UNTIL_ALONE:
                self.outcome.refused.append(Refusal(factor.name, "the budget did not suffice"))
                continue
            found = self._measure(f"alone {factor.name}", Changes(), factor.changes, most=8)
            self._tried.append(factor)
            self.outcome.alone[factor.name] = found
            if found.wins:
                self._best = max(self._best, found.gain)
        best = [self._best_of(self._winners_of(group)) for group in dict.fromkeys(one.group for one in self._tried)]
        return sorted(filter(None, best), key=lambda one: -self.outcome.alone[one.name].gain)

    def _winners_of(self, group: str) -> list[Factor]:
        return [one for one in self._tried if one.group == group and self.outcome.alone[one.name].wins]

    def _best_of(self, factors: Sequence[Factor]) -> Factor | None:
        """Return the simplest of those that gain as much as any, as far as intervals tell; None of none."""
        gains = [self.outcome.alone[one.name].gain_interval for one in factors]
        least = max((low for low, _ in gains), default=0.0)
        return next((one for one, (_, high) in zip(factors, gains, strict=True) if high >= least), None)

    def _try_together(self, winners: list[Factor]) -> list[Factor]:
        """Return the winners without those that the others make useless; or the best alone if they do not add up."""
        chosen = list(winners)
        while len(chosen) > 1:
            found = self._measure(f"together {_names(chosen)}", Changes(), together(chosen), most=8)
            if found.ratio is not None and (found.saving is None or found.over_run >= LEAST_SPEED):
                self._best = max(self._best, found.gain)
                break
            self._variants.forget(together(chosen))
            chosen.pop()  # they cannot work together, or not at a bearable speed: without the least effective
        for factor in reversed(winners):
            others = [other for other in chosen if other is not factor]
            name = f"without {factor.name} of {_names(chosen)}"
            if not others or factor not in chosen or (name not in self.journal and self._passed() > _UNTIL_TOGETHER):
                continue
            known = needed_of_two(found, self.outcome.alone[others[0].name]) if len(winners) == 2 else None
            result = known or self._measure(name, together(chosen), together(others), most=8)
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
            name = f"{rival.name} in place of {factor.name} of {_names(chosen)}"
            is_affordable = name in self.journal or self._passed() < _UNTIL_ADDED
            if rival is factor or not is_affordable or gains[rival.name] < _NOTABLY * gains[factor.name]:
                continue
            found = self._measure(name, together(chosen), together(changed), most=16, width=0.03, has_to_pay=True)
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
            name = f"{factor.name} beside {_names(chosen)}"
            is_affordable = name in self.journal or self._passed() < _UNTIL_ADDED
            if not chosen or factor.group in {one.group for one in chosen} or not is_affordable:
                continue
            found = self._measure(name, together(chosen), together([*chosen, factor]), most=8, has_to_pay=True)
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
        name = f"undecided {_names(undecided)} beside {_names(chosen)}"
        if not undecided or (name not in self.journal and self._passed() > _UNTIL_ADDED):
            return chosen
        changed = [*chosen, *undecided]
        found = self._measure(name, together(chosen), together(changed), most=24, width=0.02, has_to_pay=True)
        self.outcome.added[_names(undecided)] = found
        return self._choose(changed, chosen, found.wins)

    def _choose(self, changed: list[Factor], chosen: list[Factor], is_better: bool) -> list[Factor]:
        """Return the better of two sets of changes; end the other's variant, and keep this one for what follows."""
        better, other = (changed, chosen) if is_better else (chosen, changed)
        self._variants.forget(together(other))
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
            self.outcome.proof = self._measure(
                f"proof {_names(chosen)}", Changes(), together(chosen), least=8, most=40, width=0.03
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
        names = _names(factors)

        def measure() -> tuple[dict[str, Any], float | None]:
            try:
                if self.project.serves:
                    verdict = self._outputs.judge(together(factors), exactly)
                else:
                    verdict = self._compare_losses(factors) if exactly else self._compare_seeds(factors)
            except TrialError as error:
                return asdict(Verdict(False, str(error))), self._cut_at(self._passed() >= _BEFORE_PROOF, error)
            return asdict(verdict), self._cut_at(verdict.is_open or self._passed() >= _BEFORE_PROOF)

        what = "equal" if exactly else f"equivalent after {self._num_steps((), factors)} steps"
        result = self.journal.result(f"{what} {names}", measure)
        self.outcome.verdicts.append(Verdict(result["passed"], f"{names}: {result['reason']}"))
        return self.outcome.verdicts[-1].passed

    def _compare_losses(self, factors: Sequence[Factor]) -> Verdict:
        base, moved, other = (
            self._losses(one, [0], _EXACT_STEPS, perturb)[0]
            for one, perturb in (((), False), ((), True), (factors, False))
        )
        return are_equal(base, moved, other)

    def _compare_seeds(self, factors: Sequence[Factor]) -> Verdict:
        """Compare as many seeds as it takes to decide, or as there is time for."""
        base: Losses = []
        other: Losses = []
        taken = 0.0
        verdict = Verdict(False, "", is_open=True)
        for num_seeds in LOOKS:
            if not verdict.is_open:
                break
            # another look takes as long as all before
            if base and self._passed() + taken / self.budget > _BEFORE_PROOF:
                return replace(verdict, reason=f"{verdict.reason}; the budget did not suffice for more seeds")
            seeds = range(len(base), num_seeds)
            for losses, changed in (base, ()), (other, factors):
                recorded, seconds = self._losses(changed, seeds, self._num_steps(changed, factors))
                losses += recorded
                taken += seconds
            verdict = are_equivalent(base, other)
        return verdict

    def _record_outputs(self, changes: Changes, perturb: bool) -> Outputs:
        self._say("outputs")
        folder, server = self._variants.new_folder(), self._variants.server_for(changes)
        try:
            return record_outputs(self.project, changes, folder, self._deadline(1.0, _BEFORE_PROOF), perturb, server)
        except TrialError:
            if not self._variants.has_lost(Changes()):
                raise
            return self._record_outputs(changes, perturb)

    def _losses(
        self, factors: Sequence[Factor], seeds: Sequence[int], num_steps: int, perturb: bool = False
    ) -> tuple[Losses, float]:
        """Return losses of each seed with changes, and the seconds that they have taken."""
        names = "perturbed" if perturb else _names(factors)

        def measure() -> tuple[dict[str, Any], float | None]:
            self._say(f"losses of {names}" if names else "losses of the run as it is")
            begin = time.monotonic()
            changes = together(factors)
            try:
                losses = record_losses(
                    self.project, changes, self._variants.new_folder(), seeds, num_steps,
                    self._deadline(1.0, _BEFORE_PROOF), perturb, self._variants.server_for(changes),
                )  # fmt: skip
            except TrialError:
                if not self._variants.has_lost(Changes()):
                    raise
                return measure()
            return {"losses": losses, "seconds": time.monotonic() - begin}, None

        result = self.journal.result(f"losses {seeds[0]} to {seeds[-1]}, {num_steps} steps, {names}", measure)
        return result["losses"], result["seconds"]

    def _measure(
        self,
        name: str,
        against: Changes,
        changes: Changes,
        *,
        most: int,
        least: int = 4,
        width: float = 0.04,
        has_to_pay: bool = False,
    ) -> Measurement:
        """Measure changes against others; wait for no start that cannot pay if it has to, or against no changes."""

        def measure(is_repeated: bool = False) -> tuple[dict[str, Any], float | None]:
            begin = time.monotonic()
            found, failure = Measurement(), None
            deadline = self._deadline(0.3 if least == 4 else 1.0)
            try:
                reference, before = self._warm_variant(name, against, deadline)
                speed, start = (1.0, self._planned.start_seconds) if against == Changes() else (self._best, before)
                paid = (speed, start) if has_to_pay or against == Changes() else ()
                pays_until = time.monotonic() + self._planned.longest_start(*paid)
                variant, found.start_seconds = self._warm_variant(name, changes, min(deadline, pays_until))
                rate = LatencyRate()
                found.ratio = compare(
                    reference, variant, width=width, least=least, seconds=self._turn, deadline=deadline,
                    most=2 * most if self.project.serves else most,  # samples are short, and so are turns
                    needed=self._planned.needed_speed(found.start_seconds, *paid) if paid else 1.0,
                    samples=self._samples(changes) / self._samples(against),
                    **({"rate": rate} if self.project.serves else {}),
                )  # fmt: skip
                if self.project.serves:
                    found.before, found.after = rate.latency_of(reference), rate.latency_of(variant)
                found.over_run = self._planned.speed_over_run(found.ratio.value, found.start_seconds, speed, start)
                if self.outcome.goal == "memory":
                    found.saving = saving_of(reference, variant)
                    if least > 4:
                        found.memory = prove_saving(self._variants.new, changes, self._turn, self._deadline(1.0))
                found.reason = self._planned.why_not(found)
            except TrialError as error:
                if self._variants.has_lost(against) and not is_repeated:  # the changes have not failed
                    return measure(is_repeated=True)
                found.reason = str(error)
                failure = error
                if isinstance(error, NotReadyError) and pays_until < deadline:
                    rest = "the whole run trains" if against == Changes() else "the run trains with the others"
                    found.reason = f"starts for longer than {rest}"
                self._variants.forget_ended()
                self._variants.forget(changes)
            if name.startswith("alone"):
                self._variants.forget(changes)
            found.seconds = time.monotonic() - begin
            return asdict(found), self._cut_at(time.monotonic() + 2 * self._turn > deadline, failure)

        return Measurement.of(self.journal.result(name, measure))

    def _warm_variant(self, name: str, changes: Changes, deadline: float) -> tuple[Variant, float]:
        if changes not in self._variants:
            self._say(name)
        return self._variants.warm(changes, deadline)

    def _cut_at(self, is_cut: bool, error: TrialError | None = None) -> float | None:
        """Return the budget that cut a measurement short, None for none; 0 if a full disk did, so it is repeated."""
        return 0.0 if isinstance(error, DiskFullError) else self.budget if is_cut else None

    def _samples(self, changes: Changes) -> float:
        return samples_per_step(self._baseline["facts"], changes)

    def _num_steps(self, changed: Sequence[Factor], compared: Sequence[Factor]) -> int:
        """Return the steps of each seed, with ``changed``, that show how what is compared learns at the beginning."""
        affordable = _SHARE_OF_FIVE * self.budget * self._baseline["rate"] / min(LOOKS)
        times = max(BATCH_SIZE_FACTORS) if self._samples(together(compared)) > 1 else 1
        return int(min(_MOST_STEPS * times, max(12 * times, affordable)) / self._samples(together(changed)))

    def _passed(self) -> float:
        return (time.monotonic() - self._begin) / self.budget

    def _deadline(self, share: float, until: float = _END) -> float:
        """Return when a share of the budget will have passed from now on, or one of it from the beginning on."""
        return min(time.monotonic() + share * self.budget, self._begin + until * self.budget)

    def _say(self, what: str) -> None:
        self.progress(what, min(1.0, self._passed()), self._best)


def _candidates(goal: Goal, baseline: Mapping[str, Any], allow: Sequence[str]) -> Iterable[Factor | Refusal]:
    facts = baseline["facts"]
    if goal == "memory":
        return savings_for(facts)
    if goal == "latency":
        return latency_factors_for(facts)
    return chain(learning_changes_for(facts, allow), factors_for(facts, baseline["waited"]), float8_for(facts, allow))


def _names(factors: Iterable[Factor]) -> str:
    return ", ".join(factor.name for factor in factors)
