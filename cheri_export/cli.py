"""The command line. Heavy libraries are imported by the commands, so that --help is instant."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import traceback
from typing import Any, NoReturn

import click

from cheri_export import __version__
from cheri_export.errors import CheriError, OutputError
from cheri_export.spec import OPSETS, PRECISIONS

EXIT_ACCURACY, EXIT_PROBLEM, EXIT_FAULT = 1, 2, 70
EXIT_HANGUP, EXIT_INTERRUPT, EXIT_TERMINATED = 129, 130, 143

_DEFAULT_COMMAND = "export"


class _Signalled(BaseException):
    """Ctrl-C or SIGTERM.

    No KeyboardInterrupt: click answers that one itself, and where it passes through an ``exec``
    Python ends the process by the signal although it was caught.
    """


class _Commands(click.Group):
    """A group whose default command takes the first argument that names no subcommand."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = ("--help", "-h", "--version")
        if args and args[0] not in own and args[0] not in self.commands:
            args = [_DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # where our handler is not in place
            raise _Signalled from None

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "MODEL [-o OUT] [OPTIONS]")
        formatter.write_usage(ctx.command_path, "COMMAND [ARGS]...", prefix="       ")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        command = self.commands[_DEFAULT_COMMAND]
        with click.Context(command, info_name=_DEFAULT_COMMAND, parent=ctx) as inner:
            command.format_options(inner, formatter)
        self.format_commands(ctx, formatter)


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=_Commands, context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="cheri-export")
def cli() -> None:
    """Turn a trained Cherimoya checkpoint into a checked ONNX bundle.

    MODEL is a checkpoint of any Cherimoya release. The bundle OUT holds model.onnx, the weights as
    read, and a report of every error against a float64 reference. A file that is named like a
    command is given as ./NAME.

    Exit codes: 0 good, 1 the accuracy verdict failed, 2 a problem of the input or the machine,
    70 a fault of this program.
    """


@cli.command(_DEFAULT_COMMAND)
@click.argument("model")
@click.option(
    "-o", "--output", "out", metavar="OUT", help="Folder to write [default: MODEL's name + .cheri]."
)
@click.option(
    "--precision",
    metavar="|".join(PRECISIONS),
    default="fp32",
    show_default=True,
    help="Precision tier.",
)
@click.option("--length", type=int, metavar="L", help="Input length to check at [default: 2114].")
@click.option(
    "--batch", type=int, metavar="N", default=4, show_default=True, help="Batch size to check at."
)
@click.option(
    "--opset",
    type=int,
    metavar="|".join(map(str, OPSETS)),
    default=20,
    show_default=True,
    help="ONNX opset.",
)
@click.option("--check-sequences", metavar="FILE.fa", help="Check on these sequences, too.")
@click.option(
    "--controls",
    metavar="SPEC.bw|FILE.npz|zero",
    help="Control tracks of the sequences: a.bw,b.bw are separate, plus.bw+minus.bw one pair.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random check.")
@click.option("--source", metavar="TEXT", help="Where the model comes from; stored.")
@click.option("--license", "license_", metavar="TEXT", help="The model's license; stored.")
@click.option("--force", is_flag=True, help="Replace OUT whatever it is.")
@click.option(
    "--allow-mismatch", is_flag=True, help="Write OUT although the verdict failed (exit 1)."
)
@click.option("--json", "as_json", is_flag=True, help="Print report.json.")
@click.option("--quiet", "-q", is_flag=True, help="No progress and no summary.")
def export_command(
    model: str,
    out: str | None,
    precision: str,
    length: int | None,
    batch: int,
    opset: int,
    check_sequences: str | None,
    controls: str | None,
    seed: int,
    source: str | None,
    license_: str | None,
    force: bool,
    allow_mismatch: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Export and check a model (the default command)."""
    from cheri_export.progress import Progress

    progress = Progress(quiet=quiet, after_step=_raise_pending)
    with progress.step("start", "loading torch and onnx"):
        from cheri_export import pipeline, report

    options = pipeline.ExportOptions(
        precision=precision,
        opset=opset,
        length=length,
        batch=batch,
        seed=seed,
        check_sequences=check_sequences,
        controls=controls,
        source=source,
        license=license_,
        force=force,
        allow_mismatch=allow_mismatch,
    )
    result = pipeline.export(model, out, options, progress=progress, command=_command_line())
    done = f"{result.path} is complete, but its summary could not be printed"
    if as_json:
        _print(report.to_json(result.report), done)
    elif not quiet:
        _print(_summary(result), done)
    if not result.passed:
        for line in result.report["verdict"]["failures"][:5]:
            _print_error(line)
        return EXIT_ACCURACY
    return 0


def _command_line() -> list[str]:
    return ["cheri-export", *sys.argv[1:]]


def _summary(result: Any) -> str:
    verdict, checkpoint = result.report["verdict"], result.report["checkpoint"]
    lines = [
        f"{'PASSED' if result.passed else 'FAILED'}  {verdict['headline']}",
        *(
            f"warning: {text}"
            for text in [*checkpoint["warnings"], *result.report["export"]["warnings"]]
        ),
        f"{result.path}{os.sep}",
    ]
    for path in sorted(result.path.iterdir()):
        lines.append(f"  {path.name:<20} {path.stat().st_size:>12,} bytes")
    return "\n".join(lines)


@cli.command("info")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info_command(model: str, as_json: bool) -> int:
    """Say what a checkpoint is: release, geometry, shapes, hash, warnings."""
    from cheri_export import describe
    from cheri_export.checkpoint import read_checkpoint

    found = describe.info(read_checkpoint(model))
    text = json.dumps(found, indent=2) if as_json else _info_text(found)
    _print(text, "standard output cannot be written")
    return 0


def _info_text(found: dict[str, Any]) -> str:
    model = found["model"]
    groups = model["signal_groups"]
    rows = [
        ("file", found["file"]),
        ("sha256", found["sha256"]),
        ("release", f"{found['release']} ({found['release_reason']})"),
        ("name", model["name"] or "-"),
        ("parameters", f"{found['n_parameters']:,}"),
        (
            "filters x layers",
            f"{model['n_filters']} x {model['n_layers']}, hidden {model['hidden']}",
        ),
        ("signal groups", "not stated in the file" if groups is None else str(groups)),
        ("control tracks", model["n_control_tracks"]),
        ("kernels", f"stem {model['stem_kernel']}, profile {model['profile_kernel']}"),
        ("residual scale", "learned (gamma)" if model["has_gamma"] else model["residual_scale"]),
        ("trimming", f"{model['trimming']} bases from each end"),
        ("receptive field", f"{model['receptive_field']} bases, and the norm over the whole input"),
        ("shortest input", f"{model['min_length']} bases"),
    ]
    for kind in ("inputs", "outputs"):
        for tensor in model[kind]:
            shape = ", ".join(map(str, tensor["shape"]))
            rows.append(
                (kind[:-1], f"{tensor['name']} ({shape}) {tensor['dtype']}: {tensor['meaning']}")
            )
    rows += [("warning", text) for text in found["warnings"]]
    return "\n".join(f"{key:<18}{value}" for key, value in rows)


def _print(text: str, problem: str) -> None:
    """Print a result; a reader that has left is no error, a full disk is."""
    try:
        click.echo(text)
    except (OSError, ValueError) as error:
        # Or Python's own last flush would fail once more, and change the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise OutputError(f"{problem} ({error})") from error


def _print_error(text: str) -> None:
    try:
        click.echo(f"cheri-export: {text}", err=True)
    except (OSError, ValueError):
        pass  # nobody reads it; the exit code says the rest


def _fail(message: str, code: int = EXIT_PROBLEM) -> NoReturn:
    _print_error(f"error: {' '.join(str(message).split())}")
    raise SystemExit(code)


_ENDINGS = {
    signal.SIGINT: ("interrupted; nothing was written", EXIT_INTERRUPT),
    signal.SIGTERM: ("terminated; nothing was written", EXIT_TERMINATED),
    signal.SIGHUP: ("the terminal is gone; nothing was written", EXIT_HANGUP),
}
_received: list[int] = []


def _on_signal(signum: int, frame: Any) -> None:
    _received.append(signum)
    raise _Signalled


def _raise_pending() -> None:
    """Raise again what Python dropped: a handler's exception inside ``__del__``, say."""
    if _received:
        raise _Signalled


def _problem(message: str, code: int = EXIT_PROBLEM) -> NoReturn:
    """Fail; after a signal say so, whatever a library made of it (an ImportError, say)."""
    if _received:
        message, code = _ENDINGS[signal.Signals(_received[0])]
    _fail(message, code)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether torch or ONNX Runtime ran out of memory; they raise types of their own."""
    text = str(error)
    return any(sign in text for sign in ("allocate memory", "bad_alloc", "bad allocation"))


def _install_signals() -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP: leave it so
            signal.signal(number, _on_signal)


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit code."""
    _received.clear()
    _install_signals()
    # Before torch loads OpenMP: its threads otherwise spin while they wait, and on a machine whose
    # cores are busy the float64 reference takes five to twenty times longer.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may hold any bytes
    try:
        code = cli.main(args=argv, prog_name="cheri-export", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        raise SystemExit(EXIT_PROBLEM) from None
    except click.NoSuchOption as error:
        _problem(
            f"{error.format_message()} (a file of that name is given as ./{error.option_name})"
        )
    except click.UsageError as error:
        where = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        _problem(error.format_message() + where)
    except CheriError as error:
        _problem(str(error))
    except (_Signalled, KeyboardInterrupt, click.Abort):
        _problem("interrupted; nothing was written", EXIT_INTERRUPT)
    except MemoryError:
        _problem("not enough memory; use a smaller --batch or --length")
    except Exception as error:
        if _received:
            _problem("")
        if _is_out_of_memory(error):
            _problem("not enough memory; use a smaller --batch or --length")
        traceback.print_exc()
        _fail(f"this is a fault of cheri-export, please report it: {error}", EXIT_FAULT)
    raise SystemExit(code if isinstance(code, int) else 0)
