"""Entry point of ``python -m lightning_accel``; requests that need no torch are answered without importing it."""

import gc
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from lightning_accel import __version__
from lightning_accel.cli.shipped_configs import find_shipped_configs

_HELP = f"""\
usage: lightning-accel [--version] [--debug] {{fit,validate,test,predict,export,tune,plan,doctor,build-ops}} [options]

lightning_accel {__version__}: train and run PyTorch Lightning modules from a config, ours or your own.

subcommands:
  fit          train, validating as it goes
  validate     one pass over the validation data
  test         one pass over the test data
  predict      write predictions to predictions.csv in the run folder
  export       write the model to a file that runs without its class, checked on validation data:
               lightning-accel export --config X.yaml --ckpt_path best --format onnx --output model.onnx

  tune         find a faster variant of a run on this machine, proven to learn the same:
               lightning-accel tune --config X.yaml --budget 10m, with --goal memory or latency for less of these
  plan         predict memory, communication and time on other machines, for each strategy, without them:
               lightning-accel plan --config X.yaml --gpus 8xH100-80GB --machines 4
  doctor       describe this machine and measure what it reaches; with --config X train X for some seconds, and tell
               where its time goes and what slows it: lightning-accel doctor --help
  build-ops    build the native kernels now, not when they are first used: lightning-accel build-ops --help

most used options, after the subcommand:
  --config FILE              YAML config, yours or one that comes with the package (moe_digits.yaml); repeat it to
                             override one file with the next
  --model CLASS              a class of lightning_accel by its name, or yours by its path: my_file.MyModule
  --model.OPTION VALUE       a constructor argument of it; likewise --data CLASS, --data.OPTION VALUE
  --optimizer CLASS, --lr_scheduler CLASS
                             in place of the module's own
  --trainer.OPTION VALUE     an argument of lightning.Trainer
  --ckpt_path FILE|best|auto checkpoint to resume (a file) or to run; best: that of the run in
                             whose folder the config lies, or of the newest;
                             auto: fit goes on where the newest run was stopped, or begins
  --seed_everything NUMBER   seed of every random generator
  --print_config             print the whole config that would run, with all defaults, and stop

  lightning-accel fit --help                      every option
  lightning-accel fit --model.help MoEClassifier  the options of one class

  --debug      show the traceback of an error
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments``, by default the program's own, and return its exit status."""
    is_program = arguments is None
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"lightning_accel {__version__}")
        return 0
    if arguments in ([], ["-h"], ["--help"]):
        print(_HELP, end="")
        return 0 if arguments else 2
    arguments = find_shipped_configs(arguments)
    if is_program:
        from lightning_accel.cli.allocator import restart_with_allocator

        restart_with_allocator(arguments)
    if arguments[0] == "build-ops":
        from lightning_accel.cli.build_ops import build_ops

        return build_ops(arguments[1:])
    if arguments[0] == "doctor":
        from lightning_accel.cli.doctor import run_doctor

        return run_doctor(arguments[1:])
    if arguments[0] == "plan":
        from lightning_accel.cli.plan import run_plan

        return run_plan(arguments[1:])
    if arguments[0] == "tune":
        from lightning_accel.cli.tune import run_tune

        return run_tune(arguments[1:])
    fewer_imports: AbstractContextManager[None] = nullcontext()
    if is_program:
        gc.disable()  # a million objects of imported modules, none of them garbage, would be searched again and again
        if not {"-h", "--help"}.isdisjoint(arguments):
            from lightning_accel.cli.help_imports import imports_for_help

            fewer_imports = imports_for_help()
    with fewer_imports:
        from lightning_accel.cli import run

    if is_program:
        gc.freeze()
        gc.enable()
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
