"""What a search measures: how fast variants of a run are, and whether they compute or learn the same."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning_accel.measure.machine import free_memory_bytes
from lightning_accel.tuning.choices import Goal
from lightning_accel.tuning.comparison import Shares, compare, steps_per_second
from lightning_accel.tuning.factors import Factor
from lightning_accel.tuning.identity import distributions_of, require_same, state_of
from lightning_accel.tuning.journal import Journal
from lightning_accel.tuning.latencies import Latency, LatencyRate
from lightning_accel.tuning.learning import BATCH_SIZE_FACTORS, samples_per_step
from lightning_accel.tuning.outcome import LEAST_SPEED, Measurement, names_of, together
from lightning_accel.tuning.outputs import OutputComparison, Outputs, record_outputs
from lightning_accel.tuning.parity import LOOKS, Losses, Verdict, are_equal, are_equivalent, record_losses
from lightning_accel.tuning.planned_run import PlannedRun
from lightning_accel.tuning.planned_step import planned_bytes
from lightning_accel.tuning.project import Changes, Project
from lightning_accel.tuning.room import Room, room_of
from lightning_accel.tuning.savings import prove_saving, saving_of
from lightning_accel.tuning.serving import NUM_SAMPLES
from lightning_accel.tuning.variant import DiskFullError, NotReadyError, TrialError, Variant
from lightning_accel.tuning.variants import Variants

_EXACT_STEPS = 10
# by rounding alone, runs from equal seeds grow apart, and after more steps may differ as much as seeds do
_MOST_STEPS = 30
_SHARE_OF_FIVE = 0.05  # of the budget, for those of five seeds
_PLAN_SECONDS = 20.0  # for a plan of a step at least, which takes some seconds
_END = 0.99  # share of the budget, after which the last turn and the end of all processes come
_BEFORE_PROOF = 0.9  # share of the budget after which no comparison goes on, since nothing is handed back without proof


class Measurer:
    """Measure variants of a project within a time, each result once; see :class:`lightning_accel.tuning.search.Search`.

    Args:
        project: what is tuned.
        folder: where the journal and the files of trials are written.
        budget: seconds for everything.
        identity: plain values that tell this project on this machine from others.
        goal: ``speed``, ``memory`` or ``latency``.
        progress: called with what is being done, the share of the budget that has passed, and :attr:`best`.

    Attributes:
        journal: results by name.
        baseline: result of :meth:`measure_baseline`.
        best: how many times as fast as the run as it is the fastest variant so far is.

    Raises:
        ValueError: if the folder holds measurements of another project.
    """

    def __init__(
        self,
        project: Project,
        folder: Path,
        budget: float,
        identity: dict[str, Any],
        goal: Goal,
        progress: Callable[[str, float, float], None],
    ) -> None:
        self.project = project
        self.folder = folder
        self.budget = budget
        self.goal = goal
        self.progress = progress
        self.journal = Journal(folder / "journal.jsonl", identity, budget)
        self.baseline: dict[str, Any] = {}
        self.best = 1.0
        self._begin = time.monotonic() - self.journal.seconds
        self._turn = 1.0
        self._outputs = OutputComparison(self._record_outputs)
        self._variants = Variants(project, folder / "trials")

    @property
    def seconds(self) -> float:
        """Return how long everything has taken so far."""
        return time.monotonic() - self._begin

    def may_begin(self, name: str, until: float) -> bool:
        """Return whether there is a result, or time for one: less than a share ``until`` of the budget has passed."""
        return name in self.journal or self._passed() <= until

    def may_prove(self, name: str, factors: Sequence[Factor], start_seconds: float, num_turns: int = 16) -> bool:
        """Return whether there is a result, or time to measure changes that start for some seconds and prove them.

        Exact changes whose losses deviate together are compared one by one.
        """
        if self.project.serves or name in self.journal:
            return True
        kinds = {factor.kind for factor in factors}
        starts = [start_seconds]
        steps = num_turns * self._turn * self.baseline["rate"]
        if num_exact := sum(factor.kind in ("equal", "exact") for factor in factors):
            num_compared = num_exact + 1 if num_exact > 1 else 1
            starts += [self.baseline["start_seconds"]] * 2 + [start_seconds] * num_compared
            steps += (2 + num_compared) * _EXACT_STEPS
        if kinds - {"equal", "checked"}:  # optimizers may enlarge the rounding of exact ones, and seeds then decide
            starts += [self.baseline["start_seconds"], start_seconds]
            steps += min(LOOKS) * (self._num_steps((), factors) + self._num_steps(factors, factors))
        return self.seconds + sum(starts) + steps / self.baseline["rate"] < _BEFORE_PROOF * self.budget

    def forget(self, changes: Changes) -> None:
        """End the variant with changes, which is not measured again."""
        self._variants.forget(changes)

    def stop(self) -> None:
        """End all processes, and remove their files."""
        self._variants.stop()

    def measure_baseline(self) -> None:
        """Measure the run as it is, on which all else depends.

        Raises:
            TrialError: if it does not work.
        """

        def measure() -> tuple[dict[str, Any], float | None]:
            begin = time.monotonic()
            free = free_memory_bytes()
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
            peaks = list(baseline.peak_bytes().values())
            return {
                "facts": facts,
                "code": state_of(code["files"], distributions_of(code["packages"])),
                "rate": steps_per_second(steps),
                "latency": asdict(Latency.of(steps)) if self.project.serves else None,
                "peaks": peaks,
                "room": room_of(facts, max(peaks, default=0), free),
                "shares": asdict(Shares.of(steps)),
                "start_seconds": start_seconds,
                "seconds": time.monotonic() - begin,
            }, None

        self.baseline = self.journal.result("baseline", measure)
        code = self.baseline["code"]
        require_same(code, state_of(*code.values()), self.folder)
        if measured := self.baseline.get("room"):
            self._variants.room = Room(
                **measured, world_size=self.baseline["facts"]["world_size"], plan=self._plan_step
            )
        self._planned = PlannedRun(
            self.baseline["facts"]["planned_steps"],
            self.baseline["rate"],
            self.baseline["start_seconds"],
            least_speed=LEAST_SPEED if self.goal == "memory" else 1.0,
        )
        enough = (NUM_SAMPLES if self.project.serves else 5) / self.baseline["rate"]
        self._turn = min(5.0, max(0.5, self.budget / 600, enough))  # longer ones are told apart better

    def why_no_room(self, factor: Factor) -> str:
        """Return why a factor is not tried: more memory than there is; nothing if it fits."""
        reason = self._variants.room.why_not(factor.changes) if self._variants.room else ""
        self._variants.fit_together(Changes(), factor.changes)  # planned now, and not in the time of a measurement
        return reason

    def _plan_step(self, changes: Changes) -> int | None:
        changed = changes.trainer | changes.batching

        def measure() -> tuple[dict[str, Any], float | None]:
            begin = time.monotonic()
            self._say("plan of a step")
            result: dict[str, Any] = {"bytes": None, "reason": ""}
            failure = None
            deadline = self._deadline(max(0.1, _PLAN_SECONDS / self.budget))
            try:
                result["bytes"] = planned_bytes(
                    self.project, changes, self.baseline["facts"], self._variants.new_folder(),
                    deadline, self._variants.server_for(changes),
                )  # fmt: skip
            except TrialError as error:
                result["reason"], failure = str(error), error
            is_cut = time.monotonic() > deadline
            return result | {"seconds": time.monotonic() - begin}, self._cut_at(is_cut, failure)

        return self.journal.result(f"plan of a step with {changed}" if changed else "plan of a step", measure)["bytes"]

    def measure(
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
                speed, start = (1.0, self._planned.start_seconds) if against == Changes() else (self.best, before)
                paid = (speed, start) if has_to_pay or against == Changes() else ()
                pays_until = time.monotonic() + self._planned.longest_start(*paid)
                variant, found.start_seconds = self._warm_variant(name, changes, min(deadline, pays_until))
                rate = LatencyRate()
                found.ratio = compare(
                    reference, variant, width=width, seconds=self._turn, deadline=deadline,
                    most=2 * most if self.project.serves else most,  # samples are short, and so are turns
                    least=least if self._variants.fit_together(against, changes) else max(3, least // 2),
                    needed=self._planned.needed_speed(found.start_seconds, *paid) if paid else 1.0,
                    samples=self._samples(changes) / self._samples(against),
                    **({"rate": rate} if self.project.serves else {}),
                )  # fmt: skip
                if self.project.serves:
                    found.before, found.after = rate.latency_of(reference), rate.latency_of(variant)
                found.over_run = self._planned.speed_over_run(found.ratio.value, found.start_seconds, speed, start)
                if self.goal == "memory":
                    found.saving = saving_of(reference, variant)
                    if least > 4:
                        self._variants.make_room(Changes())
                        found.memory = prove_saving(self._variants.new, changes, self._turn, self._deadline(1.0))
                found.reason = self._planned.why_not(found)
            except TrialError as error:
                if self._variants.has_lost(against) and not is_repeated:  # the changes have not failed
                    return measure(is_repeated=True)
                found.reason = str(error)
                failure = error
                if isinstance(error, NotReadyError) and pays_until < deadline and not found.start_seconds:
                    rest = "the whole run trains" if against == Changes() else "the run trains with the others"
                    found.reason = f"starts for longer than {rest}"
                self._variants.forget_ended()
                self._variants.forget(changes)
            if name.startswith("alone"):
                self._variants.forget(changes)
            found.seconds = time.monotonic() - begin
            return asdict(found), self._cut_at(time.monotonic() + 2 * self._turn > deadline, failure)

        return Measurement.of(self.journal.result(name, measure))

    def judge(self, factors: Sequence[Factor], exactly: bool) -> Verdict:
        """Judge whether losses with changes are equal up to rounding, or equivalent over seeds.

        Where latency is the goal, outputs are compared in their place.
        """
        names = names_of(factors)

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
        return Verdict(result["passed"], f"{names}: {result['reason']}")

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
        names = "perturbed" if perturb else names_of(factors)

        def measure() -> tuple[dict[str, Any], float | None]:
            self._say(f"losses of {names}" if names else "losses of the run as it is")
            begin = time.monotonic()
            changes = together(factors)
            self._variants.make_room(changes)
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

    def _warm_variant(self, name: str, changes: Changes, deadline: float) -> tuple[Variant, float]:
        if changes not in self._variants:
            self._say(name)
        return self._variants.warm(changes, deadline)

    def _cut_at(self, is_cut: bool, error: TrialError | None = None) -> float | None:
        """Return the budget that cut a measurement short, None for none; 0 if a full disk did, so it is repeated."""
        return 0.0 if isinstance(error, DiskFullError) else self.budget if is_cut else None

    def _samples(self, changes: Changes) -> float:
        return samples_per_step(self.baseline["facts"], changes)

    def _num_steps(self, changed: Sequence[Factor], compared: Sequence[Factor]) -> int:
        """Return the steps of each seed, with ``changed``, that show how what is compared learns at the beginning."""
        affordable = _SHARE_OF_FIVE * self.budget * self.baseline["rate"] / min(LOOKS)
        times = max(BATCH_SIZE_FACTORS) if self._samples(together(compared)) > 1 else 1
        return int(min(_MOST_STEPS * times, max(12 * times, affordable)) / self._samples(together(changed)))

    def _passed(self) -> float:
        return self.seconds / self.budget

    def _deadline(self, share: float, until: float = _END) -> float:
        """Return when a share of the budget will have passed from now on, or one of it from the beginning on."""
        return min(time.monotonic() + share * self.budget, self._begin + until * self.budget)

    def _say(self, what: str) -> None:
        self.progress(what, min(1.0, self._passed()), self.best)
