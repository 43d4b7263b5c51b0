"""Options that several commands share: numbers, the two models, how to sample; and what becomes of them."""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


Prompt = str | list[dict[str, str]]  # text, or the messages of a chat
TEMPERATURE = 0.7
LARGEST_SEED = 2**31 - 1  # many are made of it, which torch takes up to 2^63
DTYPES = ("float32", "bfloat16", "float16")
HALF = "float16"  # what packed layers may round their weights to


class Pair(NamedTuple):
    """The models of a command, and the tokenizer they share."""

    name: str
    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None  # `None` for random weights


def number(
    lowest: float, highest: float = math.inf, *, is_whole: bool = False, is_open: bool = False
) -> Callable[[str], float]:
    """An argparse type: a number in [lowest, highest], or only above `lowest` where `is_open`."""

    def parse(text: str) -> float:
        try:
            value = int(text) if is_whole else float(text)
        except ValueError:
            value = math.nan
        if not (lowest < value <= highest or (value == lowest and not is_open)):
            bounds = f"{'above' if is_open else 'of at least'} {lowest:g}"
            bounds += f" and at most {highest:g}" if highest < math.inf else ""
            raise argparse.ArgumentTypeError(f"needs a {'whole ' * is_whole}number {bounds}, got {text!r}")
        return value

    return parse


def add_models(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name a target and a draft."""
    add = parser.add_argument_group("models", "without a name of a pair or a model: the embedded pair").add_argument
    add("--pair", metavar="NAME", help="a pair on the Hub, such as qwen3-8b; an unknown name lists all")
    add("--model", "--target", metavar="ID", help="target: a folder or an id on the Hub")
    add(
        "--assistant",
        "--draft",
        metavar="ID",
        help="draft with the target's tokenizer: a folder or an id on the Hub",
    )
    add("--device", help="cpu, cuda, cuda:1, ... (default: the GPU if there is one)")
    add("--dtype", choices=DTYPES, help="of the weights (default: the checkpoint's on a GPU, float32 on a CPU)")
    add("--assistant-dtype", "--draft-dtype", choices=DTYPES, help="of the draft's weights (default: as the target's)")
    add(
        "--pack",
        nargs="?",
        const=True,
        choices=(HALF,),
        metavar=HALF,
        help=f"pack the linear layers of both models, on a CPU; with {HALF} behind it, from weights rounded to that "
        "(see docs/cpu.md)",
    )
    add("--no-pack", dest="pack", action="store_false", default=None, help="leave the linear layers as they are")
    add(
        "--assistant-pack",
        "--draft-pack",
        nargs="?",
        const=True,
        choices=(HALF,),
        metavar=HALF,
        help="pack those of the draft, or pack them otherwise (default: as --pack says)",
    )


def check_models(args: argparse.Namespace) -> None:
    """Refuses options that name two pairs, or half of one, and what the device does not have."""
    if args.pair and (args.model or args.assistant):
        raise ValueError("--pair names both models: give either --pair, or --model and --assistant.")
    if bool(args.model) != bool(args.assistant):
        missing = "--assistant (the draft)" if args.model else "--model (the target)"
        raise ValueError(f"--model and --assistant belong together: {missing} is missing.")
    if any(packings(args)):
        _check_packings(args)


def packings(args: argparse.Namespace) -> tuple[bool | str, bool | str]:
    """Whether to pack the target and the draft; "float16": with weights in that."""
    target = args.pack or False
    return target, args.assistant_pack or target


def _check_packings(args: argparse.Namespace) -> None:
    from .pairs import find_device

    option = "--pack" if args.pack else "--assistant-pack"
    if (device := find_device(args.device)).type != "cpu":
        raise ValueError(f"{option} is for a CPU, and the models go to {device}: leave it out, or add --device cpu.")
    target, draft = packings(args)
    if target == HALF and args.dtype not in (None, "float32"):
        raise ValueError(
            f"--pack {HALF} rounds weights of float32: leave --dtype {args.dtype} out, or take --pack alone."
        )
    dtype = args.assistant_dtype or args.dtype
    if draft == HALF and dtype not in (None, "float32"):
        raise ValueError(
            f"A draft in {dtype} cannot be packed in {HALF}, which is for float32: leave that precision out, or take "
            f"--draft-pack without {HALF}, which keeps it."
        )


def load(args: argparse.Namespace) -> Pair:
    """The pair that the options name, or else the embedded one."""
    import torch

    from . import pairs

    names = pairs.named(args.pair) if args.pair else (args.model, args.assistant)
    device = pairs.find_device(args.device)
    dtype = args.dtype and getattr(torch, args.dtype)
    if all(names):
        pair = Pair(" + ".join(names), *pairs.load(*names, device=device, dtype=dtype))
    else:
        from . import embedded

        pair = Pair("embedded pair", *embedded.load_pair(device=device, dtype=dtype))
    return prepared(args, pair)


def prepared(args: argparse.Namespace, pair: Pair) -> Pair:
    """The pair with the draft's own precision and packed layers, where these were asked for."""
    import torch

    name, target, draft, tokenizer = pair
    if args.assistant_dtype:
        draft = copy.deepcopy(draft).to(getattr(torch, args.assistant_dtype))  # it may share weights with the target
        name += f", draft in {args.assistant_dtype}"
    ways = packings(args)
    if any(ways):
        from .packed_linears import pack_linears

        for model, way in zip((target, draft), ways, strict=True):
            if way:
                pack_linears(model, torch.float16 if way == HALF else None)
        said = [f"packed in {HALF}" if way == HALF else "packed" if way else "not packed" for way in ways]
        name += f", {said[0]}" if ways[0] == ways[1] else f", target {said[0]}, draft {said[1]}"
    return Pair(name, target, draft, tokenizer)


def check_folders(args: argparse.Namespace, *options: str) -> None:
    """
    Raises:
        ValueError: if the folder of a file that is to be written is not there.
    """
    for option in options:
        path = getattr(args, option)
        if path and not Path(path).parent.is_dir():
            raise ValueError(f"--{option} {path}: there is no folder {Path(path).parent}. Make it first.")


def make_output_folder(args: argparse.Namespace) -> None:
    """
    Makes the folder `--output` if one is asked for: at the start, and not when all has been measured.

    Raises:
        ValueError: if that cannot be.
    """
    if args.output:
        try:
            Path(args.output).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--output {args.output} cannot be a folder: {error.strerror}. Give another.") from None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps advice to those who call `generate()` themselves out of the tables."""
    import warnings

    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # other packages' calls
            yield
    finally:
        logging.set_verbosity(before)


def check_room(config: PreTrainedConfig, num_tokens: int, remedy: str) -> None:
    """
    Raises:
        ValueError: if the longest text, prompt and all, has more tokens than a target of that `config` can hold.
    """
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if most is not None and num_tokens > most:
        raise ValueError(f"The longest text comes to {num_tokens} tokens, and the target holds {most}: {remedy}.")


def add_sampling(add: Callable[..., Any]) -> None:
    """Adds, by `add`, a group's `add_argument`, the options that say how to sample."""
    default = "(default: %(default)s)"
    add("--temperature", type=number(0, is_open=True), default=TEMPERATURE, metavar="T", help=default)
    add("--top-k", type=number(1, is_whole=True), metavar="K", help="(default: off)")
    add("--top-p", type=number(0, 1, is_open=True), metavar="P", help="(default: off)")
    add("--seed", type=number(0, LARGEST_SEED, is_whole=True), default=0, help=default)


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The same for `generate()`: off unless asked for, whatever the checkpoint's own generation config says."""
    return {"temperature": args.temperature, "top_k": args.top_k or 0, "top_p": args.top_p or 1.0}


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> Any:
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """
    Ids of a prompt; of a text, as a user's turn where the tokenizer has a chat template.

    Raises:
        ValueError: for a prompt without tokens, for messages where there is no chat template, or that it refuses.
    """
    if tokenizer.chat_template:
        from jinja2 import TemplateError

        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(
                f"The tokenizer's chat template does not take the prompt {str(prompt)[:80]!r} ({error}): give a text, "
                'or messages with "role" and "content".'
            ) from error
    elif isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:
        raise ValueError("A prompt is a list of messages, but the tokenizer has no chat template: give its text.")
    if not ids:
        raise ValueError(f"The prompt {prompt!r} has no tokens: give some text.")
    return list(ids)
