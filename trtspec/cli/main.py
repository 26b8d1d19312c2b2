"""The trtspec command: results to stdout, progress and logs to stderr."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from types import FrameType

import click

from trtspec import __version__
from trtspec.cli.bench import bench
from trtspec.cli.build import build
from trtspec.cli.demo import demo
from trtspec.cli.export import export
from trtspec.cli.inspect import inspect
from trtspec.cli.run import run
from trtspec.cli.triton_repo import triton_repo
from trtspec.cli.tune import tune
from trtspec.errors import TrtspecError, UserError


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="trtspec")
@click.option("-v", "--verbose", is_flag=True, help="Log what is done to stderr.")
def cli(verbose: bool) -> None:
    """Speculative decoding that never changes the output: build engines, run them, measure them."""
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, stream=sys.stderr, format="%(levelname)s: %(message)s")
    if sys.stderr is not None and sys.stderr.isatty():
        # Who waits at a terminal is told why.
        logging.getLogger("trtspec.session").setLevel(logging.INFO)


for command in (demo, build, run, bench, tune, inspect, triton_repo, export):
    cli.add_command(command)


def main(command: click.Command = cli, name: str = "trtspec") -> None:
    """Run a command and exit: 0 done, 1 a failure or bug, 2 wrong input, 130 interrupted."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(_run(command, name))


def _run(command: click.Command, name: str) -> int:
    try:
        command.main(prog_name=name, standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.UsageError as error:
        return _fail(2, f"{error.format_message()} (see: {_help_of(error)})")
    except UserError as error:
        return _fail(2, str(error))
    except TrtspecError as error:
        return _fail(1, str(error))
    except (click.Abort, KeyboardInterrupt):
        return _fail(130, "interrupted")
    except BrokenPipeError:
        # The reader of our output went away; what Python flushes at exit must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(1, str(error) if error.filename else f"the output cannot be written: {error.strerror}")
    except Exception as error:
        traceback.print_exc()
        return _fail(1, f"this is a bug in trtspec: {type(error).__name__}: {error}")
    return 0


def _fail(code: int, message: str) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return code


def _help_of(error: click.UsageError) -> str:
    return f"{error.ctx.command_path if error.ctx else 'trtspec'} --help"


def _terminate(signum: int, frame: FrameType | None) -> None:
    """End by the same way as Ctrl-C, so that nothing half-written stays behind."""
    raise KeyboardInterrupt
