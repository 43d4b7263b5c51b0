"""The benchmark tasks, as lm-eval defines them, with questions from the Hub or from a local file."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import logging
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arguments import quiet_transformers


if TYPE_CHECKING:
    from lm_eval.api.task import Task


class Definition(NamedTuple):
    """A task of lm-eval, and which of its scores is reported."""

    name: str  # lm-eval's
    file: str  # in the folder of lm-eval's tasks
    split: str  # that the questions are taken from
    metric: str
    filter: str = "none"


TASKS = {
    "gsm8k": Definition(
        "gsm8k_cot_zeroshot", "gsm8k/gsm8k-cot-zeroshot.yaml", "test", "exact_match", "flexible-extract"
    ),
    "ifeval": Definition("ifeval", "ifeval/ifeval.yaml", "train", "prompt_level_strict_acc"),
    "gpqa_diamond": Definition(
        "gpqa_diamond_cot_zeroshot",
        "gpqa/cot_zeroshot/gpqa_diamond_cot_zeroshot.yaml",
        "train",
        "exact_match",
        "flexible-extract",
    ),
}


@dataclass(frozen=True)
class Question:
    """
    A question of a task.

    Args:
        index (`int`): Place among the task's questions.
        prompt (`str`): The text that the model goes on with, chat template included.
        stops (`tuple` of `str`): Texts at which an answer ends.
    """

    index: int
    prompt: str
    stops: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Of the prompt."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()


def check_lm_eval() -> None:
    """
    Raises:
        ImportError: if lm-eval is missing.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ImportError("Evaluation needs lm-eval: pip install 'cactus_hf[eval]'.")


def check_sentences() -> None:
    """Raises `OSError` where IFEval's answers could not be scored once they are all there."""
    import lm_eval.tasks.ifeval.instructions_util  # noqa: F401  # fetches what is missing, if it can
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        raise OSError(
            "IFEval counts sentences with NLTK's punkt_tab, which cannot be fetched: put it, as tokenizers/punkt_tab, "
            "in a folder that NLTK_DATA names."
        ) from None


def load_task(name: str, data: str | None = None) -> Task:
    """
    The task called `name`.

    Args:
        name (`str`): One of `TASKS`.
        data (`str`, *optional*): File with its questions: JSON lines with the fields of the Hub's data set; for GPQA
            also the zip archive of its authors, which is read in memory. By default the Hub's data set.
    """
    import tempfile

    from lm_eval import tasks

    definition = TASKS[name]
    folders = importlib.util.find_spec("lm_eval.tasks")
    assert folders is not None and folders.submodule_search_locations
    original = Path(folders.submodule_search_locations[0]) / definition.file
    manager = tasks.TaskManager(include_path=str(original.parent), include_defaults=False)
    if data is None:
        return manager.load(definition.name)["tasks"][definition.name]
    with tempfile.TemporaryDirectory() as place:
        # lm-eval changes a task by a file that includes the task's own
        file = Path(place) / f"{name}.yaml"
        file.write_text(_local(definition, original, Path(data).resolve()), encoding="utf-8")
        return manager.load(str(file))["tasks"][definition.name]


def _local(definition: Definition, original: Path, data: Path) -> str:
    """A task file that takes the questions from `data`."""
    lines = [f"include: {original}", f"task: {definition.name}", "dataset_name: null"]
    if data.suffix == ".zip":
        source: dict[str, Any] = {"path": str(data)}
        lines += ["custom_dataset: !function cactus_hf.evaluation.gpqa.read"]
    else:
        source = {"data_files": {definition.split: str(data)}}
        lines += ["dataset_path: json"]
        # The Hub's data has a split of examples too, which no task here asks for
        lines += ["training_split: null", "fewshot_split: null"] if definition.split == "test" else []
    lines.append(f"dataset_kwargs: {json.dumps(source)}")
    return "\n".join(lines) + "\n"


def questions(task: Task, tokenizer: Any, limit: int | None, has_template: bool) -> list[Question]:
    """The first `limit` questions of the task, as prompts."""
    _build(task, tokenizer, limit, has_template)
    found = []
    for instance in task.instances:
        prompt, options = instance.args
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else until
        found.append(Question(instance.doc_id, prompt, tuple(stop for stop in stops if stop)))
    return found


def _build(task: Task, tokenizer: Any, limit: int | None, has_template: bool) -> None:
    def chat(history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return tokenizer.apply_chat_template(
            history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    template = {"apply_chat_template": True, "chat_template": chat} if has_template else {}
    random.seed(0)  # GPQA's choices are shuffled whenever its questions are asked for
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar of milliseconds
        task.build_all_requests(limit=limit, rank=0, world_size=1, **template)


def scores(task: Task, definition: Definition, texts: dict[int, str]) -> dict[int, float]:
    """The score, 0 to 1, of the answer to each question in `texts`; `questions` was called before."""
    for instance in task.instances:
        instance.resps = [texts.get(instance.doc_id, "")]
        instance.filtered_resps = {}
    task.apply_filters()
    found = {}
    for instance in task.instances:
        if instance.doc_id in texts:
            answer = instance.filtered_resps[definition.filter]
            results = task.process_results(instance.doc, [answer])
            found[instance.doc_id] = float(results[definition.metric])
    return found


@contextlib.contextmanager
def own_data(task: str, path: str | None) -> Iterator[None]:
    """Turns whatever lm-eval and datasets make of a file that does not fit into an error about that file."""
    try:
        yield
    except Exception as error:
        if path is None or isinstance(error, ImportError):
            raise
        cause = error.__cause__ or error
        raise ValueError(
            f"--data {path} does not hold questions of {task} ({type(cause).__name__}: {cause}): give JSON "
            "lines with the fields of the Hub's data set, or GPQA's zip archive for gpqa_diamond."
        ) from error


@contextlib.contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """Keeps lm-eval's and datasets' own words and bars out of the output."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    with quiet_transformers():
        yield
