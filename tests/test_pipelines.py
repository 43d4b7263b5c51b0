"""`pipeline("text-generation")` with an enabled model writes what plain pipelines write, prompt by prompt."""

from __future__ import annotations

import copy

import pytest
from transformers import GenerationConfig, TextGenerationPipeline, TextStreamer, pipeline

import cactus_hf
import tiny


PROMPTS = ["w5 w6 w7", "w9 w10 w11 w12 w13", "w20"]
CHATS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
GREEDY = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
DRAFT = tiny.pair("llama")[1]


@pytest.fixture(scope="module")
def plain():
    return pipeline("text-generation", model=tiny.model("llama"), tokenizer=tiny.word_tokenizer())


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    DRAFT.save_pretrained(folder)
    tiny.word_tokenizer().save_pretrained(folder)
    return str(folder)


def ours(model=None, **options):
    """A pipeline around an enabled copy of the target that `plain` holds, or around `model`."""
    model = cactus_hf.enable(copy.deepcopy(model or tiny.model("llama")))
    return pipeline("text-generation", model=model, tokenizer=tiny.word_tokenizer(), **options)


class TestWhereThingsAreGiven:
    """Draft and delta in the constructor, in the call, or in a generation config."""

    @pytest.mark.parametrize(
        ("constructor", "call"),
        (
            ({}, {"assistant_model": DRAFT, "cactus_delta": 1.0}),
            ({"assistant_model": DRAFT}, {"cactus_delta": 1.0}),
            ({"assistant_model": DRAFT, "cactus_delta": 1.0}, {}),
            ({"assistant_model": DRAFT, "cactus_delta": 1.0, "batch_size": 2}, {}),
            ({"assistant_model": DRAFT, "assistant_tokenizer": tiny.word_tokenizer(), "cactus_delta": 1.0}, {}),
            ({"assistant_model": DRAFT, "acceptance_rule": cactus_hf.TopK(5)}, {}),
            ({"cactus_delta": 1.0, "prompt_lookup_num_tokens": 3}, {}),
            ({"cactus_delta": 1.0}, {"prompt_lookup_num_tokens": 3}),
        ),
    )
    def test_text_is_that_of_single_prompts(self, plain, constructor, call):
        expected = [plain(prompt, **GREEDY) for prompt in PROMPTS]
        options = {"batch_size": 3} | GREEDY | call if "batch_size" not in constructor else GREEDY | call
        with cactus_hf.track() as calls:
            assert ours(**constructor)(PROMPTS, **options) == expected
        assert [len(call.rounds) for call in calls] == ([2, 1] if "batch_size" in constructor else [3])

    def test_the_call_goes_before_the_constructor(self):
        pipe = ours(assistant_model=DRAFT, cactus_delta=0.0)
        sampling = {"batch_size": 3, "do_sample": True, "max_new_tokens": 20, "eos_token_id": None}
        with cactus_hf.track() as calls:
            pipe(PROMPTS, **sampling)
            pipe(PROMPTS, cactus_delta=1.0, **sampling)
        assert calls[0].ball_kl == 0 and calls[1].ball_kl > 0

    def test_the_draft_as_a_folder(self, plain, draft_folder):
        pipe = ours(assistant_model=draft_folder, cactus_delta=1.0)
        with cactus_hf.track() as calls:
            assert pipe(PROMPTS, batch_size=3, **GREEDY) == [plain(prompt, **GREEDY) for prompt in PROMPTS]
        assert len(calls) == 1

    @pytest.mark.parametrize("where", ("constructor", "call"))
    def test_a_generation_config(self, plain, where):
        config = GenerationConfig(do_sample=False, max_new_tokens=12)
        config.cactus_delta = 1.0
        both = [{"generation_config": config}, {}]
        constructor, call = both if where == "constructor" else reversed(both)
        expected = [plain(prompt, do_sample=False, max_new_tokens=12) for prompt in PROMPTS]
        with cactus_hf.track() as calls:
            assert ours(assistant_model=DRAFT, **constructor)(PROMPTS, batch_size=3, **call) == expected
        assert len(calls) == 1

    def test_a_model_by_name_under_enable_for_the_process(self, draft_folder):
        cactus_hf.enable()
        try:
            pipe = pipeline("text-generation", model=draft_folder, assistant_model=draft_folder, cactus_delta=1.0)
            with cactus_hf.track() as calls:
                pipe(PROMPTS, batch_size=3, **GREEDY)
        finally:
            cactus_hf.disable()
        assert len(calls) == 1 and (calls[0].accepted == calls[0].drafted).all()

    def test_without_enable_the_delta_is_refused(self):
        pipe = pipeline("text-generation", model=tiny.model("llama"), tokenizer=tiny.word_tokenizer())
        with pytest.raises(ValueError, match="cactus_delta"):
            pipe(PROMPTS[0], assistant_model=DRAFT, cactus_delta=1.0, **GREEDY)


class TestInputs:
    @pytest.mark.parametrize(
        "prompts",
        (CHATS, [[*chat, {"role": "assistant", "content": "w9"}] for chat in CHATS]),
        ids=("chats", "chats with a prefix of the answer"),
    )
    def test_chats(self, plain, prompts):
        pipe = ours(assistant_model=DRAFT, cactus_delta=1.0)
        expected = [plain(chat, **GREEDY) for chat in prompts]
        assert pipe(prompts, batch_size=3, **GREEDY) == expected
        assert pipe(prompts[1], **GREEDY) == expected[1]

    def test_an_empty_prompt_starts_from_bos(self, plain):
        assert ours(assistant_model=DRAFT, cactus_delta=1.0)("", **GREEDY) == plain("", **GREEDY)

    def test_a_generator_of_prompts(self, plain):
        texts = ours(assistant_model=DRAFT, cactus_delta=1.0)((prompt for prompt in PROMPTS), batch_size=2, **GREEDY)
        assert list(texts) == [plain(prompt, **GREEDY) for prompt in PROMPTS]

    def test_a_column_of_a_data_set(self, plain):
        datasets = pytest.importorskip("datasets")
        from transformers.pipelines.pt_utils import KeyDataset

        column = KeyDataset(datasets.Dataset.from_dict({"text": PROMPTS}), "text")
        texts = ours(assistant_model=DRAFT, cactus_delta=1.0)(column, batch_size=2, **GREEDY)
        assert list(texts) == [plain(prompt, **GREEDY) for prompt in PROMPTS]


class TestOptions:
    @pytest.mark.parametrize(
        "options",
        (
            {"return_full_text": False},
            {"return_tensors": True},
            {"prefix": "w3 w50 "},
            {"handle_long_generation": "hole"},
            {"skip_special_tokens": False},
            {"repetition_penalty": 1.3},
        ),
        ids=str,
    )
    def test_equal_plain(self, plain, options):
        expected = [plain(prompt, **GREEDY, **options) for prompt in PROMPTS]
        pipe = ours(assistant_model=DRAFT, cactus_delta=1.0)
        if "return_tensors" in options:  # in a batch the ids have its padding, here as in plain pipelines
            assert [pipe(prompt, **GREEDY, **options) for prompt in PROMPTS] == expected
        else:
            assert pipe(PROMPTS, batch_size=3, **GREEDY, **options) == expected

    @pytest.mark.parametrize("where", ("constructor", "call"))
    def test_stop_sequence(self, where):
        """Two tokens from the middle of what the first row would write."""
        target, draft = tiny.pair("llama", vocab=260)
        tokenizer, prompts = tiny.byte_tokenizer(), ["hello", "a longer prompt", "x"]
        plain = pipeline("text-generation", model=target, tokenizer=tokenizer, return_full_text=False)
        greedy = {"do_sample": False, "max_new_tokens": 30}  # transformers 5.17 stops by `eos_token_id`
        stop = plain(prompts[0], **greedy)[0]["generated_text"][6:8]
        expected = [plain(prompt, stop_sequence=stop, **greedy) for prompt in prompts]
        assert len(expected[0][0]["generated_text"]) <= 8

        options = [{"stop_sequence": stop}, {}]
        constructor, call = options if where == "constructor" else reversed(options)
        model = cactus_hf.enable(copy.deepcopy(target))
        own = {"assistant_model": draft, "cactus_delta": 1.0, "return_full_text": False}
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, **own, **constructor)
        assert pipe(prompts, batch_size=3, **greedy, **call) == expected

    def test_num_return_sequences(self):
        pipe = ours(assistant_model=DRAFT, cactus_delta=1.0, return_full_text=False)
        texts = pipe(PROMPTS, batch_size=3, num_return_sequences=3, do_sample=True, max_new_tokens=12)
        assert [len(row) for row in texts] == [3, 3, 3]
        assert all(len({sequence["generated_text"] for sequence in row}) > 1 for row in texts)

    def test_a_delta_and_a_seed_a_row(self):
        pipe = ours(assistant_model=DRAFT)
        sampling = {"do_sample": True, "max_new_tokens": 12}
        together = pipe(PROMPTS, batch_size=3, cactus_delta=[0.0, 0.5, 2.0], generator=[1, 2, 3], **sampling)
        for index, delta in enumerate((0.0, 0.5, 2.0)):
            alone = pipe(PROMPTS[index], cactus_delta=delta, generator=[index + 1], **sampling)
            assert alone == together[index]

    def test_a_streamer(self, plain, capsys):
        pipe = ours(assistant_model=DRAFT, cactus_delta=1.0)
        texts = []
        for each in (plain, pipe):
            each(PROMPTS[0], streamer=TextStreamer(tiny.word_tokenizer()), **GREEDY)
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1] != ""

    def test_a_subclass_of_the_pipeline(self, plain):
        class Upper(TextGenerationPipeline):
            def postprocess(self, *args, **kwargs):
                return [row["generated_text"].upper() for row in super().postprocess(*args, **kwargs)]

        model = cactus_hf.enable(copy.deepcopy(tiny.model("llama")))
        pipe = Upper(model=model, tokenizer=tiny.word_tokenizer(), assistant_model=DRAFT, cactus_delta=1.0)
        texts = pipe(PROMPTS, batch_size=3, **GREEDY)
        assert texts == [[plain(prompt, **GREEDY)[0]["generated_text"].upper()] for prompt in PROMPTS]


class TestOtherSpecialTokens:
    """Configs that name other special tokens over one vocabulary, as a base draft and an instruct target do."""

    @pytest.fixture
    def target(self):
        model = copy.deepcopy(tiny.model("llama"))
        model.config.eos_token_id = model.generation_config.eos_token_id = [tiny.EOS, 45]
        return model

    @pytest.fixture
    def expected(self, target):
        pipe = pipeline("text-generation", model=target, tokenizer=tiny.word_tokenizer())
        return [pipe(prompt, do_sample=False, max_new_tokens=12) for prompt in PROMPTS]

    @pytest.mark.parametrize("where", ("call", "tokenizer", "folder"))
    def test_ways_that_work(self, target, expected, draft_folder, where):
        constructor = {
            "call": {},
            "tokenizer": {"assistant_model": DRAFT, "assistant_tokenizer": tiny.word_tokenizer()},
            "folder": {"assistant_model": draft_folder},
        }[where]
        call = {"assistant_model": DRAFT} if where == "call" else {}
        pipe = ours(target, cactus_delta=1.0, **constructor)
        assert pipe(PROMPTS, batch_size=3, do_sample=False, max_new_tokens=12, **call) == expected

    def test_the_way_that_does_not_names_one_that_does(self, target):
        with pytest.raises(ValueError, match="pass the assistant tokenizer"):
            ours(target, assistant_model=DRAFT)

    def test_a_draft_whose_vocabulary_is_padded(self, plain):
        padded = tiny.model("llama", vocab=104)
        pipe = ours(assistant_model=padded, assistant_tokenizer=tiny.word_tokenizer(), cactus_delta=1.0)
        assert pipe(PROMPTS, batch_size=3, **GREEDY) == [plain(prompt, **GREEDY) for prompt in PROMPTS]
