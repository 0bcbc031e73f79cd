"""Tokenizer, chat templates and incremental detokenisation, against Hugging Face."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer

from orchestrator.tokenizer import Tokenizer
from pilotfish.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from pilotfish.tokenizer_hash import tokenizer_hash
from tests.tiny_models import byte_tokenizer, write_tokenizer

TEXTS = [
    "Hello, world!  Two  spaces,\n\ttabs\n",
    "Grüße: naïve façade, Ελλάδα, 東京, עברית",
    "emoji 🐟🦈👩‍👩‍👧, combining e\u0301, a literal \ufffd",
    " leading space",
    "",
]


def sentencepiece_tokenizer() -> FastTokenizer:
    """In the style of Llama 2: a mark for spaces, bytes as a fallback, one space stripped in front."""
    words = ["▁", "▁the", "▁a", "he", "t", "h", "e", "l", "o", "w", "r", "d", "é", "\ufffd", ",", "▁wo", "x"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = FastTokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace_tokenizer() -> FastTokenizer:
    pieces = ["<unk>", "</s>", *"abcdefgh,", "▁a", "▁be", "▁", "ab"]
    tokenizer = FastTokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [("a", "b")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def wordpiece_tokenizer() -> FastTokenizer:
    pieces = ["[UNK]", "[SEP]", "the", "cat", "##s", "don", "'", "t", ".", ",", "n't", "ü"]
    tokenizer = FastTokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


def suffix_tokenizer() -> FastTokenizer:
    """The end of a word is marked, so the last token reads differently once another follows."""
    pieces = ["<unk>", "<pad>", "a</w>", "b", "c</w>", "dé</w>"]
    tokenizer = FastTokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.add_special_tokens(["<pad>"])
    return tokenizer


def byte_tokenizer_with_added_tokens() -> FastTokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool é>", special=False), AddedToken(" two words", special=False)])
    return tokenizer


BUILDERS = {
    "bytes": byte_tokenizer,
    "bytes with added tokens": byte_tokenizer_with_added_tokens,
    "sentencepiece": sentencepiece_tokenizer,
    "metaspace": metaspace_tokenizer,
    "wordpiece": wordpiece_tokenizer,
    "suffix": suffix_tokenizer,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, found = tmp_path_factory.mktemp("tokenizers"), {}
    for name, build in BUILDERS.items():
        found[name] = write_tokenizer(root / name.replace(" ", "_"), build())
        if not name.startswith("bytes"):  # the end token written is one of theirs; transformers would add it
            change(found[name], "tokenizer_config.json", eos_token=None, pad_token=None)
    return found


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer(folder) for name, folder in folders.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer whose files a test may change."""
    return write_tokenizer(tmp_path / "model", byte_tokenizer())


def change(folder: Path, name: str, **entries: Any) -> None:
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | entries))


# Ids


@pytest.mark.parametrize("name", ["bytes", "bytes with added tokens", "sentencepiece", "metaspace"])
@pytest.mark.parametrize("text", [*TEXTS, "<|im_start|>user\nhi<|im_end|>", "the <s> a</s>"])
def test_encode_is_that_of_transformers(
    folders: dict[str, Path], tokenizers: dict[str, Tokenizer], name: str, text: str
) -> None:
    reference = AutoTokenizer.from_pretrained(folders[name])
    ids = tokenizers[name].encode(text)
    assert ids == reference(text)["input_ids"]
    assert tokenizers[name].decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_what_is_far_too_long_is_refused_before_it_is_read(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["bytes"]
    assert len(tokenizer.encode("hi " * 2000, max_len=1000)) > 1000, "whether it fits is not for the tokenizer to say"
    for call in (
        lambda: tokenizer.encode("hi " * 1_000_000, max_len=1000),
        lambda: tokenizer.encode_chat([{"role": "user", "content": "hi " * 1_000_000}], max_len=1000),
    ):
        with pytest.raises(InvalidArgumentError, match=r"prompt is 3\d+ characters; at most 999 tokens fit this model"):
            call()


def test_others_go_on_while_a_long_text_is_read(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer, turns, done = tokenizers["bytes"], 0, threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not done.wait(0.001):
            turns += 1

    thread = threading.Thread(target=take_turns)
    thread.start()
    before = turns
    ids = tokenizer.encode("the cat and the hat " * 50_000)
    during = turns - before
    done.set()
    thread.join()
    assert len(ids) > 50_000
    assert during > 10


def test_special_tokens_around_a_prompt_come_from_the_model(tokenizers: dict[str, Tokenizer]) -> None:
    assert tokenizers["sentencepiece"].encode("the")[0] == 1


def test_truncation_and_padding_saved_with_a_tokenizer_do_not_apply(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    loaded = Tokenizer(write_tokenizer(tmp_path / "model", tokenizer))
    assert len(loaded.encode("a long prompt")) > 8
    assert len(loaded.encode("a")) == 1


def test_vocab_size_and_hash(folders: dict[str, Path], tokenizers: dict[str, Tokenizer]) -> None:
    assert tokenizers["bytes"].vocab_size == 280
    assert tokenizers["bytes with added tokens"].vocab_size == 282
    assert tokenizers["bytes"].hash == tokenizer_hash(folders["bytes"])


def test_end_tokens_are_those_of_the_generation_config_or_else_the_config_and_of_the_tokenizer(folder: Path) -> None:
    assert Tokenizer(folder).eos_token_ids == {2}
    change(folder, "config.json", eos_token_id=5)
    assert Tokenizer(folder).eos_token_ids == {2, 5}
    change(folder, "generation_config.json", eos_token_id=[1, 0])
    assert Tokenizer(folder).eos_token_ids == {0, 1, 2}
    change(folder, "generation_config.json", eos_token_id=None)
    assert Tokenizer(folder).eos_token_ids == {2, 5}


@pytest.mark.parametrize("value", ["2", [2, "3"], True, 2.0])
def test_an_end_token_that_is_none_is_named(folder: Path, value: Any) -> None:
    change(folder, "generation_config.json", eos_token_id=value)
    with pytest.raises(InvalidArgumentError, match=r"generation_config.json: eos_token_id is .*must be a token id"):
        Tokenizer(folder)


def test_a_model_without_an_end_token_has_none(folder: Path) -> None:
    change(folder, "tokenizer_config.json", eos_token=None)
    assert Tokenizer(folder).eos_token_ids == frozenset()


# What is wrong with a folder


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"model folder .*/nowhere does not exist"):
        Tokenizer(tmp_path / "nowhere")


def test_a_missing_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(NotFoundError, match=r"tokenizer.json does not exist"):
        Tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_file_is_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(InvalidArgumentError, match=name):
        Tokenizer(folder)


# Chat templates

CHAT = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": 'Say "hi" & <b>'},
    {"role": "assistant", "content": "  hé  "},
    {"role": "user", "content": "Again"},
]
BOS = {"__type": "AddedToken", "content": "<|im_start|>", "lstrip": False, "normalized": False, "rstrip": False}
EACH = "{% for m in messages %}"
TEMPLATES = {
    "blocks trimmed": EACH + "\n  {% if m.role == 'user' %}\n{{ m['content'] }}\n  {% endif %}\n{% endfor %}",
    "special tokens": "{{ bos_token }}" + EACH + "{{ m.content | trim }}{{ eos_token }}{% endfor %}{{ cls_token }}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "date": "{{ strftime_now('%Y-%m') }}",
    "generation": EACH + "{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "loop controls": EACH + "{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}" + EACH + "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "defaults": "{{ tools is none }}{{ documents is none }}{{ anything is defined }}{{ 'x' if add_generation_prompt }}",
    "prompt": EACH + "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}\n",
}


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_is_that_of_transformers(folder: Path, name: str, add_generation_prompt: bool) -> None:
    change(folder, "tokenizer_config.json", chat_template=TEMPLATES[name], bos_token=BOS)
    ids = Tokenizer(folder).encode_chat(CHAT, add_generation_prompt)
    reference = AutoTokenizer.from_pretrained(folder)
    assert ids == reference.apply_chat_template(CHAT, add_generation_prompt=add_generation_prompt, return_dict=False)


@pytest.mark.parametrize("name", ["special tokens", "prompt", "generation"])
@pytest.mark.parametrize("last", ["hé", "  hé  \n", "in ha in", "{{ 7 }}"])
def test_a_message_to_go_on_with_is_that_of_transformers(folder: Path, name: str, last: str) -> None:
    change(folder, "tokenizer_config.json", chat_template=TEMPLATES[name], bos_token=BOS)
    chat = [*CHAT, {"role": "assistant", "content": last}]
    ids = Tokenizer(folder).encode_chat(chat, continue_final_message=True)
    reference = AutoTokenizer.from_pretrained(folder)
    assert ids == reference.apply_chat_template(chat, continue_final_message=True, return_dict=False)
    assert chat[-1]["content"] == last


def test_a_template_that_hides_the_last_message_cannot_go_on_with_it(folder: Path) -> None:
    change(folder, "tokenizer_config.json", chat_template="{{ messages | length }}")
    with pytest.raises(InvalidArgumentError, match="does not write the last message's content"):
        Tokenizer(folder).encode_chat(CHAT, continue_final_message=True)


def test_the_variables_of_a_template_are_those_that_it_reads(folder: Path) -> None:
    template = (
        "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ bos_token }}{% set own = 1 %}{{ own }}"
        "{% for m in messages %}{{ namespace(a=1).a }}{% if loop.last and effort %}x{% endif %}{% endfor %}"
        "{{ strftime_now('%Y') }}{% if tools %}{{ raise_exception('no') }}{% endif %}"
    )
    change(folder, "tokenizer_config.json", chat_template=template)
    assert Tokenizer(folder).template_variables() == {"thinking", "effort"}


def test_a_template_file_goes_before_the_configuration(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("from the file: {{ messages[0].content }}")
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode_chat(CHAT[1:])) == 'from the file: Say "hi" & <b>'


def test_of_several_templates_the_default_is_taken(folder: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    change(folder, "tokenizer_config.json", chat_template=several)
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode_chat(CHAT)) == "plain"


def test_templates_of_their_own_files(folder: Path) -> None:
    """For requests with tools that named tool_use; files go before the configuration, each for its name."""
    several = [{"name": "tool_use", "template": "configured"}, {"name": "default", "template": "plain"}]
    change(folder, "tokenizer_config.json", chat_template=several)
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("{{ tools[0].function.name }}")
    (more / "rag.jinja").write_text("documents")
    tokenizer = Tokenizer(folder)
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert tokenizer.decode(tokenizer.encode_chat(CHAT, tools=tools)) == "look"
    assert tokenizer.decode(tokenizer.encode_chat(CHAT)) == "plain"
    (folder / "chat_template.jinja").write_text("from the file")
    assert Tokenizer(folder).template_source(with_tools=False) == "from the file"
    assert Tokenizer(folder).template_source(with_tools=True) == "{{ tools[0].function.name }}"


def test_special_tokens_are_not_put_around_a_chat(tokenizers: dict[str, Tokenizer]) -> None:
    assert tokenizers["sentencepiece"].encode_chat(CHAT)[0] != 1


def test_a_model_without_a_template_says_what_to_do(folder: Path) -> None:
    change(folder, "tokenizer_config.json", chat_template=None)
    with pytest.raises(FailedPreconditionError, match="no chat template: use a plain prompt"):
        Tokenizer(folder).encode_chat(CHAT)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "messages do not fit .*: roles must alternate"),
        ("{{ messages[7].content.strip() }}", "messages do not fit .* no element 7"),
        ("{{ 1 + messages[0].content }}", "messages do not fit"),
        ("{{ messages.__class__.__mro__ }}", "messages do not fit .* unsafe"),
        ("{% set x = messages.append(1) %}", "messages do not fit .* unsafe"),
    ],
)
def test_a_template_that_refuses_is_quoted(folder: Path, template: str, message: str) -> None:
    change(folder, "tokenizer_config.json", chat_template=template)
    with pytest.raises(InvalidArgumentError, match=message):
        Tokenizer(folder).encode_chat(CHAT)


def test_a_broken_template_leaves_plain_prompts(folder: Path) -> None:
    change(folder, "tokenizer_config.json", chat_template="{% for %}")
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("a")
    with pytest.raises(FailedPreconditionError, match=r"chat template is broken .* use a plain prompt"):
        tokenizer.encode_chat(CHAT)


def test_no_messages_are_refused(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(InvalidArgumentError, match="messages is empty"):
        tokenizers["bytes"].encode_chat([])


# Detokenisation


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("text", [*TEXTS, "the cats don't, ü", "a b c a"])
def test_pieces_concatenate_to_the_text_of_all_tokens(tokenizers: dict[str, Tokenizer], name: str, text: str) -> None:
    """Behind a first token, whose space a decoder may strip."""
    tokenizer = tokenizers[name]
    prompt, ids = tokenizer.encode("a"), tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(prompt) + "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(prompt + ids)


UTF8 = [0x41, 0x20, 0x80, 0x82, 0xAC, 0xC3, 0xA9, 0xE2, 0xE0, 0xED, 0xA0, 0xF0, 0x9F, 0x90, 0x9F, 0xF4, 0xFF]


@pytest.mark.parametrize("name", ["bytes", "sentencepiece"])
def test_broken_utf_8_is_read_as_python_reads_it(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tokenizers[name]
    of_byte = {data: i for i in range(280) if len(data := tokenizer.token_bytes(i)) == 1}
    if name == "sentencepiece":
        of_byte = {bytes([byte]): 3 + byte for byte in range(256)}
    rng = random.Random(1)
    for _ in range(3000):
        data = bytes(rng.choice(UTF8) for _ in range(rng.randrange(9)))
        assert "".join(pieces_of(tokenizer, [of_byte[bytes([byte])] for byte in data])) == data.decode(errors="replace")


@pytest.mark.parametrize("name", ["bytes", "bytes with added tokens", "sentencepiece"])
@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_holds_half_a_character(tokenizers: dict[str, Tokenizer], name: str, text: str) -> None:
    pieces = pieces_of(tokenizers[name], tokenizers[name].encode(text))
    assert "".join(pieces) == " " * (name == "sentencepiece" and text != "") + text


def test_text_leaves_as_soon_as_it_is_final(tokenizers: dict[str, Tokenizer]) -> None:
    """Bytes of one character at most are held back, and none after a whole character."""
    for name in ("bytes", "sentencepiece"):
        tokenizer = tokenizers[name]
        assert pieces_of(tokenizer, tokenizer.encode("e€h")[-5:]) == ["e", "", "", "€", "h", ""]


def test_an_unfinished_character_at_the_end_is_replaced(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["bytes"]
    assert pieces_of(tokenizer, tokenizer.encode("a€")[:-1]) == ["a", "", "", "\ufffd"]


def test_special_and_end_tokens_give_no_text_but_those_shown(folder: Path) -> None:
    change(folder, "generation_config.json", eos_token_id=[2, 270])
    tokenizer = Tokenizer(folder)
    ids = [*tokenizer.encode("a"), 1, 270, 2, *tokenizer.encode("c")]
    texts = {
        name: [*map(detokenizer.push, ids)]
        for name, detokenizer in {
            "none": tokenizer.detokenizer(),
            "some": tokenizer.detokenizer(shown=[1]),
            "all": tokenizer.detokenizer(skip_special_tokens=False),
        }.items()
    }
    assert texts["none"] == ["a", "", "", "", "c"]
    assert texts["some"] == ["a", "<|im_start|>", "", "", "c"]
    assert texts["all"] == ["a", "<|im_start|>", tokenizer.decode([270]), "<|im_end|>", "c"]
    assert [tokenizer.token_id(name) for name in ("<|im_start|>", "<think>")] == [1, None]


def test_tokens_without_text_are_found_in_stop_texts_by_name(folder: Path) -> None:
    change(folder, "generation_config.json", eos_token_id=[2, 270])
    tokenizer = Tokenizer(folder)
    name = tokenizer.token_bytes(270).decode().replace(" ", "Ġ")
    assert tokenizer.hidden_tokens_in(["a", "\n<|im_end|>", name]) == {2: "<|im_end|>", 270: name}
    assert tokenizer.hidden_tokens_in(["<|im_end"]) == tokenizer.hidden_tokens_in([]) == {}


def test_the_first_word_of_a_completion_keeps_its_space(tokenizers: dict[str, Tokenizer]) -> None:
    """As in vLLM: it goes on with the prompt. Only at the beginning of all is the space none of the text."""
    tokenizer = tokenizers["sentencepiece"]
    ids = tokenizer.encode("the a")
    assert "".join(pieces_of(tokenizer, ids)) == " the a"
    assert tokenizer.decode(ids) == "the a"


def test_special_tokens_of_a_prompt_are_part_of_its_text_but_for_those_put_around_it(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["sentencepiece"]
    ids = tokenizer.encode("é</s><s>")
    assert tokenizer.prompt_texts(ids, is_text=True) == ["", "", "é", "</s>", "<s>"]
    assert tokenizer.prompt_texts(ids, is_text=False) == ["<s>", " ", "é", "</s>", "<s>"]
    assert tokenizer.prompt_texts(tokenizer.encode(""), is_text=True) == [""]
    assert tokenizer.prompt_texts(ids[2:], is_text=True) == ["é", "</s>", "<s>"]  # cut from the left


def test_special_tokens_on_both_sides_of_a_prompt_are_left_out(tmp_path: Path) -> None:
    fast = wordpiece_tokenizer()
    fast.post_processor = processors.TemplateProcessing("[SEP] $A [SEP]", special_tokens=[("[SEP]", 1)])
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "model", fast))
    ids = tokenizer.encode("the cat")
    assert (ids[0], ids[-1]) == (1, 1)
    assert tokenizer.prompt_texts(ids, is_text=True) == ["", "the", " cat", ""]
    assert tokenizer.prompt_texts(ids, is_text=False) == ["[SEP]", " the", " cat", " [SEP]"]
