"""The `dream-ext` command line. Heavy imports wait until a command runs, so that `--help` is quick."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from .loading import UserError, one_line

DEMO_PROMPT = "Describe this picture in three sentences."
DType = Literal["bfloat16", "float16", "float32"]
MethodName = Literal[
    "plain",
    "plain_packed",
    "prompt_lookup",
    "dream",
    "dream_unpacked",
    "dream_tau",
    "dream_blind",
    "dream_unaware",
    "dream_tau_unaware",
]


def _print_json(data: Any) -> None:
    print(json.dumps(data, ensure_ascii=False, allow_nan=False))


@contextlib.contextmanager
def _busy(text: str) -> Iterator[Any]:
    """A spinner on stderr, on a terminal only; yields a function that changes its text."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda line: None
        return
    with console.status(text) as status:
        yield status.update


def _start(threads: int) -> None:
    import torch

    from .loading import quiet_libraries

    if threads < 0:
        raise UserError("--threads must be 0 (torch's choice) or more")
    if threads:
        torch.set_num_threads(threads)
    quiet_libraries()


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


@dataclass
class Generate:
    """Answer a question about a picture (or without one), streaming the text."""

    prompt: str
    """The question."""
    image: Path | None = None
    """A picture file."""
    target: str | None = None
    """Folder or model id of the target; the demo model when left out."""
    drafter: str | None = None
    """Folder of the drafter; the demo's when left out."""
    temperature: float = 0.0
    """0 is greedy; above 0 samples."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    seed: int = 0
    """Seed of the sampling."""
    dtype: DType = "bfloat16"
    """Number format of target and drafter."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    threads: int = 0
    """CPU threads; 0 leaves the choice to torch."""
    pack: bool = True
    """On a CPU in bfloat16 or float32 the weights are packed for few rows; this leaves them as they are."""
    json: bool = False
    """Print one JSON object instead of streaming."""

    def run(self) -> int:
        import torch

        from . import loading
        from .bench import generate_options

        _check_counts(max_new_tokens=self.max_new_tokens)
        if self.temperature < 0:
            raise UserError(f"--temperature must be 0 or more, got {self.temperature:g}")
        picture = None if self.image is None else loading.load_picture(self.image)
        device, dtype = loading.resolve_device(self.device), loading.torch_dtype(self.dtype)
        _start(self.threads)
        with _busy("loading"):
            processor = loading.load_processor(self.target)
            inputs = loading.build_inputs(processor, self.prompt, picture, device, dtype)
            drafter = loading.load_drafter(self.drafter, self.target, dtype, device)
            target = loading.load_target(self.target, dtype, device)
        from transformers import TextStreamer

        from .generate import Decoder
        from .packed import packable
        from .policy import tree_option

        decoder = Decoder(target, drafter, tree=tree_option(drafter), pack=self.pack and packable(target))
        options = generate_options(self.max_new_tokens, self.temperature)
        tokenizer = getattr(processor, "tokenizer", processor)
        if not self.json:
            options["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        torch.manual_seed(self.seed)
        with _busy("answering") if self.json else contextlib.nullcontext():
            ids = decoder.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :]
        if self.json:
            _print_json({"text": loading.decode_text(processor, ids), "stats": decoder.stats.to_dict()})
        return 0


@dataclass
class Demo:
    """Answer one question twice, plainly and with the decoder, and compare answers and speed."""

    install: bool = False
    """Fetch and assemble the demo model, by network; asks the question only if --image or --prompt is given too."""
    image: Path | None = None
    """A picture file; one of the demo's sample pictures when left out."""
    prompt: str = DEMO_PROMPT
    """The question."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    dtype: DType = "float32"
    """Number format of target and drafter. float32 shows the same text token for token; bfloat16 is faster, and answers
    may part where two tokens are tied."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    threads: int = 0
    """CPU threads; 0 leaves the choice to torch."""
    pack: bool = True
    """On a CPU in bfloat16 or float32 the weights are packed for few rows; this leaves them as they are."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        from . import loading

        _check_counts(max_new_tokens=self.max_new_tokens)
        picture = None if self.image is None else loading.load_picture(self.image)
        device, dtype = loading.resolve_device(self.device), loading.torch_dtype(self.dtype)
        from . import demo

        _start(self.threads)
        if self.install:
            try:
                demo.install()
            except (RuntimeError, OSError, ImportError) as error:
                raise UserError(f"cannot install the demo model: {one_line(error)}") from error
            if self.image is None and self.prompt == DEMO_PROMPT:
                return 0
        processor = demo.load_processor()
        if picture is None:
            pictures = demo.pictures()
            if not pictures:
                raise UserError("the demo has no sample pictures: give --image FILE, or run `dream-ext demo --install`")
            picture = loading.load_picture(pictures[0])
        from .duel import duel, print_duel

        inputs = loading.build_inputs(processor, self.prompt, picture, device, dtype)
        with _busy("loading") as report:
            result = duel(
                lambda dtype: (
                    loading.load_target(None, dtype, device),
                    loading.load_drafter(None, None, dtype, device),
                ),
                processor,
                inputs,
                dtype=dtype,
                max_new_tokens=self.max_new_tokens,
                pack=self.pack,
                report=report,
            )
        if self.json:
            _print_json(result.to_dict())
        else:
            print_duel(result)
        return 0 if result.explained else 1


@dataclass
class Doctor:
    """Say what is installed and built, what is missing, and the command that mends it."""

    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        from .doctor import examine, print_report

        facts = examine()
        if self.json:
            _print_json(facts)
        else:
            print_report(facts)
        return 0 if facts["ok"] else 1


@dataclass
class Bench:
    """Measure speed, tau and identity against plain decoding, and write one JSON file."""

    json: Path
    """The result; rewritten after every prompt."""
    prompts: int = 24
    """How many prompts."""
    pictures: Path | None = None
    """Folder of pictures; the demo's sample pictures when left out."""
    questions: Path | None = None
    """Questions (.txt: one a line; .json: see docs/measuring.md); the shipped ones when left out."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    methods: tuple[MethodName, ...] = get_args(MethodName)
    """Ways of decoding; plain is always among them. In float32 only plain, dream and dream_unaware run; the
    unaware methods run when sampling only."""
    dtypes: tuple[DType, ...] = ("bfloat16", "float32")
    """Number formats."""
    temperatures: tuple[float, ...] = field(default=(0.0, 1.0))
    """0 is greedy."""
    seed: int = 0
    """Seed of the sampling and of the pairing of questions and pictures."""
    threads: int = 0
    """CPU threads; 0 leaves the choice to torch."""
    target: str | None = None
    """Folder or model id of the target; the demo model when left out."""
    drafter: str | None = None
    """Folder of the drafter; the demo's when left out."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    resume: bool = False
    """Go on with an unfinished result file."""

    def run(self) -> int:
        from .bench_run import run_bench

        _check_counts(max_new_tokens=self.max_new_tokens, prompts=self.prompts)
        _start(self.threads)
        return run_bench(self)


Command = (
    Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
)


def _parse(arguments: Sequence[str]) -> Any:
    """Arguments to a command. tyro explains mistakes in a box of several lines; here they become one line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                Command,
                prog="dream-ext",
                description="Lossless speculative decoding of vision-language models with a drafter that sees.",
                args=arguments,
                config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        text = [line.strip("│ ") for line in said.getvalue().splitlines() if not line.startswith(("╭", "╰"))]
        words = itertools.takewhile(lambda line: not line.startswith(("For full helptext", "Argument helptext")), text)
        said_once = " ".join(line for line in words if line.strip("─"))
        raise UserError(f"{said_once or 'bad arguments'} (see dream-ext --help)") from None


def _expected_errors() -> tuple[type[BaseException], ...]:
    """Errors that are about the request. A module that was never imported cannot have raised its own."""
    homes = {
        "demo": "NotInstalled",
        "generate": "DrafterMismatch",
        "modes": "UnsupportedMode",
        "packed": "CannotPack",
        "targets.families": "UnsupportedTarget",
    }
    loaded = {name: sys.modules.get(f"dream_ext.{module}") for module, name in homes.items()}
    return (UserError, *(getattr(module, name) for name, module in loaded.items() if hasattr(module, name)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. 2 is a mistake in the request, explained in one line on stderr."""
    try:
        return _parse(sys.argv[1:] if arguments is None else arguments).run()
    except KeyboardInterrupt:
        print("dream-ext: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if not isinstance(error, _expected_errors()):
            raise
        print(f"dream-ext: {one_line(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
