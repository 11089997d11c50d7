"""Parse the command line, and run the chosen command.

Only the module of the chosen command is imported, so that `generate` loads none of the exporter's packages.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from sdonnx._version import __version__
from sdonnx.installation import requiring
from sdonnx.terminal import FAILURE, guarded, log_to_stderr

__all__ = ["COMMANDS", "CommandParser", "run_command_line", "top_parser"]


COMMANDS = {
    "sample": ("sdonnx.cli.sample", "write a sample pipeline, small and trained, or with random weights"),
    "export": ("sdonnx.cli.export", "export a diffusers pipeline to a folder of ONNX graphs"),
    "optimize": ("sdonnx.cli.optimize", "fuse the graphs for an execution provider, convert them to fp16"),
    "explain": ("sdonnx.cli.explain", "show which operators of a folder were fused, which were not, and why"),
    "doctor": ("sdonnx.cli.doctor", "check the environment and the results of the GPU kernels"),
    "verify": ("sdonnx.cli.verify", "prove that a folder generates the same images as its original"),
    "generate": ("sdonnx.cli.generate", "generate images with an optimized folder"),
    "serve": ("sdonnx.cli.serve", "serve folders over HTTP, with OpenAI's images API"),
    "benchmark": ("sdonnx.cli.benchmark", "measure the speed of engines and compare their images"),
    "bake": ("sdonnx.cli.bake", "write an optimized folder with LoRA files in its weights"),
    "lora": ("sdonnx.cli.lora", "look into LoRA files, and convert them to the layout of PEFT"),
    "cache": ("sdonnx.cli.cached_graphs", "list or remove the graphs that sdonnx.compile has cached"),
    "completion": ("sdonnx.cli.completion", "print a script for the completion of a shell"),
    "quickstart": ("sdonnx.cli.quickstart", "generate an image with a sample pipeline and compare with PyTorch"),
}
"""Command -> (module with `add_arguments` and `run`, summary)."""


class CommandParser(argparse.ArgumentParser):
    """Parser of one command.

    An option accepts `-` and `_` as separators of words. An error is printed on one line, followed by the command's
    required arguments.
    """

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the options, or exit with status 2 after an error."""
        options, unknown = self.parse_known_args(list(self._spelled(arguments)))
        if unknown:
            self._refuse_unknown(next((each for each in unknown if each.startswith("-")), unknown[0]))
        return options

    def error(self, message: str) -> NoReturn:
        """Print the error and the usage on one line each, and exit with status 2."""
        print(f"error: {message}\nusage: {self._short_usage()}; {self.prog} --help lists them", file=sys.stderr)
        sys.exit(FAILURE)

    def _spelled(self, arguments: Sequence[str]) -> Iterator[str]:
        """Yield the arguments, with options spelled as the parser knows them; exit if one is unknown."""
        names = [name for name in self._option_string_actions if name.startswith("--")]
        spellings = {name.replace("-", "_"): name for name in names}
        given = iter(arguments)
        for argument in given:
            if argument == "--":
                yield argument
                break
            option, equals, value = argument.partition("=")
            if not option.startswith("--") or " " in argument:
                yield argument
                continue
            wanted = option.replace("-", "_")
            matches = [name for spelled, name in spellings.items() if spelled.startswith(wanted)]
            if not matches:
                self._refuse_unknown(option)
            exact = spellings.get(wanted)
            if exact is None and len({self._option_string_actions[name].dest for name in matches}) > 1:
                self.error(f"{option} is ambiguous: it could be {', '.join(sorted(matches))}")
            yield (exact or matches[0]) + equals + value
        yield from given

    def _refuse_unknown(self, argument: str) -> NoReturn:
        if not argument.startswith("-"):
            self.error(f"unexpected argument {argument!r}")
        self.error(f"unknown option {argument}{_did_you_mean(argument.replace('-', '_'), self._long_options())}")

    def _long_options(self) -> dict[str, str]:
        return {name.replace("-", "_"): name for name in self._option_string_actions if name.startswith("--")}

    def _short_usage(self) -> str:
        """Return the command with its required arguments only."""
        words = [self.prog]
        for action in self._actions:
            value = str(action.metavar or action.dest.upper())
            if not action.option_strings:
                words.append(value)
            elif action.required:
                words.append(f"{action.option_strings[0]} {value}")
        return " ".join([*words, "[options]"])


def _did_you_mean(given: str, known: dict[str, str]) -> str:
    """Return a hint at the closest known name, or "" if none is close. Keys of `known` are compared."""
    close = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {known[close[0]]}?" if close else ""


def top_parser(commands: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of the whole command line, for its help and for shell completion.

    Args:
        commands: names of the commands to add options for.
    """
    parser = argparse.ArgumentParser(prog="sdonnx", description="Diffusion pipelines on ONNX Runtime.")
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module, summary) in COMMANDS.items():
        command = subparsers.add_parser(name, help=summary)
        if name in commands:
            importlib.import_module(module).add_arguments(command)
    return parser


def run_command_line(arguments: Sequence[str]) -> int:
    """Run a command and return its exit status.

    Args:
        arguments: the command and its arguments.
    """
    name = arguments[0] if arguments else ""
    options = argparse.Namespace(debug="--debug" in arguments)
    if name in COMMANDS:
        return guarded(lambda _: _run(name, arguments[1:]), options)
    if name.startswith("-"):
        return guarded(lambda _: _answer(name), options)
    found = (
        f"unknown command {name!r}{_did_you_mean(name, {each: each for each in COMMANDS})}" if name else "no command"
    )
    print(f"error: {found}\nusage: sdonnx COMMAND [options]; COMMAND is {', '.join(COMMANDS)}", file=sys.stderr)
    return FAILURE


def _answer(option: str) -> int:
    """Print the help or the version, or an error, and exit."""
    top_parser().parse_args([option])
    return FAILURE


def _run(name: str, arguments: Sequence[str]) -> int:
    with requiring(f"sdonnx {name}", name):
        module = importlib.import_module(COMMANDS[name][0])
        parser = CommandParser(prog=f"sdonnx {name}")
        module.add_arguments(parser)
        options = parser.parse(arguments)
        with log_to_stderr(options.log_level):
            status: int = module.run(options)
    return status
