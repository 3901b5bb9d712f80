"""The command `generate`; torch is imported when it runs."""

import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mezzo_core.console import write_continued
from mezzo_core.docstrings import with_parameters
from mezzo_core.errors import UserError, values_of_the_user
from mezzo_core.generate_options import FLAGS, GenerateOptions
from mezzo_core.options import AllowPackage, Device, TokenizerName

if TYPE_CHECKING:
    from mezzo_core.data.tokenizers import Tokenizer
    from mezzo_core.nn.lm import LM

_OF_BEAMS = {"max_new_tokens"}
"""Options that `--num-beams` allows."""


def add_generate(app: typer.Typer) -> None:
    """Add the command."""

    def generate_command(
        run: Annotated[Path, typer.Argument(help="A training run's folder, or its model/.")],
        *,
        prompt: Annotated[
            list[str] | None,
            typer.Option(help="Text to continue; repeat for several. Else standard input."),
        ] = None,
        prompt_file: Annotated[
            Path | None,
            typer.Option(help="A file with a text to continue on each line that is not blank."),
        ] = None,
        stop: Annotated[
            list[str] | None,
            typer.Option(help="End after the token that completes this; repeat for several."),
        ] = None,
        logit_bias: Annotated[
            list[str] | None,
            typer.Option(
                help="Added to a token's logit, such as 17=-inf; repeat for several.",
                metavar="TOKEN=NUMBER",
            ),
        ] = None,
        assistant: Annotated[
            Path | None,
            typer.Option(help="A smaller model's run, which proposes tokens: same text, faster."),
        ] = None,
        num_beams: Annotated[
            int | None, typer.Option(help="Search the likeliest text as a whole with these beams.")
        ] = None,
        tokenizer: TokenizerName = None,
        device: Device = None,
        allow_package: AllowPackage = None,
        **flags: Any,
    ) -> None:
        """Continue a text with a trained model, printed as it is written."""
        from mezzo_core.data.stop_texts import stop_texts
        from mezzo_core.data.stream_decoder import StreamDecoder
        from mezzo_core.device import told_device
        from mezzo_core.inputs import read_prompts, told_tokenizer
        from mezzo_core.nn.checkpoint import find_model, load_model

        if assistant is None and flags["num_drafted"] is not None:
            raise UserError("--num-drafted goes with --assistant")
        folder, chosen, allowed = find_model(run), told_device(device), allow_package or ()
        texts = read_prompts(prompt, prompt_file)
        model, _, extra = load_model(folder, device=chosen, allow_packages=allowed)
        kept = told_tokenizer(extra, folder, model.vocab_size, tokenizer)
        tokens = [kept.encode(text) for text in texts]
        if not all(tokens):
            raise UserError("the prompt is empty: give --prompt TEXT, or text on standard input")
        prompts = [[*kept.begin_tokens, *row] for row in tokens]
        with values_of_the_user():
            ends = stop_texts(kept, stop) if stop else None
        biases = _biases(logit_bias) if logit_bias else None
        given: dict[str, Any] = {"stop": ends, "logit_bias": biases, **flags}
        if assistant is not None:
            helper = find_model(assistant)
            smaller, _, described = load_model(helper, device=chosen, allow_packages=allowed)
            try:  # with other tokens, all that it proposes would be in vain
                told_tokenizer(described, helper, model.vocab_size, tokenizer or extra["tokenizer"])
            except UserError as error:
                raise UserError(f"--assistant {assistant}: {error}") from error
            given["assistant"] = smaller
        given = {name: value for name, value in given.items() if value is not None}
        if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack a model's characters
            sys.stdout.reconfigure(errors="replace")
        with values_of_the_user():
            steps = _steps(model, prompts, kept, num_beams, given)
            copies = given.get("num_samples", 1)
            decoders = [StreamDecoder(kept, row) for row in prompts for _ in range(copies)]
            write_continued([text for text in texts for _ in range(copies)], decoders, steps)

    app.command("generate")(with_parameters(generate_command, FLAGS))


def _steps(
    model: "LM", prompts: Sequence[Sequence[int]], tokenizer: "Tokenizer", num_beams: int | None,
    given: dict[str, Any],
) -> Iterator[list[int | None]]:  # fmt: skip
    from mezzo_core.nn.beams import beam_search
    from mezzo_core.nn.generate import stream

    defaults = asdict(GenerateOptions())
    stops = [token for token in tokenizer.stop_tokens if token < model.vocab_size]
    if num_beams is None:
        return stream(model, prompts, stop_tokens=stops, **{**defaults, **given})
    if others := sorted(given.keys() - _OF_BEAMS):
        words = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise UserError(f"--num-beams searches without {words}")
    given = {"max_new_tokens": defaults["max_new_tokens"], **given}
    found = beam_search(model, prompts, num_beams=num_beams, stop_tokens=stops, **given)
    best = [beams[0].tokens for beams in found]
    longest = max(map(len, best))
    return ([row[i] if i < len(row) else None for row in best] for i in range(longest))


def _biases(given: Sequence[str]) -> dict[int, float]:
    found: dict[int, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            token, bias = int(name), float(value)
        except ValueError:
            raise UserError(
                f"--logit-bias must be TOKEN=NUMBER, such as 17=-inf, got {text!r}"
            ) from None
        if token in found:
            raise UserError(f"--logit-bias names token {token} twice: give one number")
        found[token] = bias
    return found
