"""Bodies of the OpenAI-compatible endpoints.

Names and types are OpenAI's; what OpenAI lacks goes by vLLM's names, so that a client of either need not change.
Ranges are judged in ``orchestrator.admission``, the same for every protocol; here only what concerns HTTP alone.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from orchestrator.http.base import Body, ignored, refused, wrong, wrong_field

MAX_PROMPTS = 128
"""Most prompts of one call."""

MAX_LOGPROBS = 20
"""Most alternatives per token, as OpenAI allows."""


def _texts(value: Any) -> Any:
    """One text or a list of texts, as a list."""
    if value is None or isinstance(value, str):
        return [] if value is None else [value]
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise wrong("it must be a text or a list of texts")
    return value


def _token_biases(value: Any) -> Any:
    """JSON has only texts as keys; they must be token ids."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong("it must be an object of token ids and numbers")
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdecimal()):
            raise wrong(f"its keys must be token ids, and {key!r} is none")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise wrong(f"its values must be numbers, and that of {key} is none")
    return {int(key): float(bias) for key, bias in value.items()}


def _draft_length(value: Any) -> Any:
    if value is None or value == "auto" or type(value) is int:
        return value
    raise wrong("it must be an integer or auto")


Texts = Annotated[list[str], BeforeValidator(_texts)]
TokenBiases = Annotated[dict[int, float], BeforeValidator(_token_biases)]


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    """A last chunk without choices has the usage; in all others it is null."""
    continuous_usage_stats: Any = refused("usage comes once, in the last chunk", False)
    include_obfuscation: Any = ignored("chunks are never padded")


class JsonSchema(Body):
    """A schema with its name."""

    name: str = "schema"
    description: Any = ignored("the model does not see it")
    schema_: dict[str, Any] = Field(alias="schema")
    """JSON Schema; the text always follows it."""
    strict: Any = ignored("the text follows the schema in any case")


class ResponseFormat(Body):
    """What form a text has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") is not (self.json_schema is not None):
            raise wrong_field("json_schema", "goes with type json_schema, and only with it")
        return self


def _schema(value: Any) -> Any:
    """A JSON Schema, maybe as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise wrong(f"it is not JSON: {error}") from error


class StructuredOutputs(Body):
    """vLLM's way to name a form; exactly one."""

    json_: Annotated[dict[str, Any] | None, BeforeValidator(_schema)] = Field(None, alias="json")
    """JSON Schema, as an object or as text."""
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    """The text is one of these."""
    grammar: str | None = None
    """EBNF."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: str | None = None
    """xgrammar's, as JSON."""

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        given = [name for name in type(self).model_fields if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise wrong("it must have exactly one of json, regex, choice, grammar, json_object and structural_tag")
        return self


class Sampling(Body):
    """What all generating endpoints have in common."""

    model: str
    """Name of the model served; see /v1/models."""

    stream: bool | None = None
    """Sends the text as it comes, as server-sent events."""
    temperature: float | None = None
    """1 where nothing is said, as with OpenAI; 0 is greedy."""
    top_p: float | None = None
    seed: int | None = None
    """Makes the text a function of seed, prompt and model alone, whatever the draft."""
    user: Any = ignored("nothing is kept per user")

    top_k: int | None = None
    """Keeps the k likeliest tokens; 0 and, as with vLLM, -1 keep all."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    """End tokens are banned before so many tokens."""
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None
    """Tokens that never come; as a logit_bias of -100."""
    allowed_token_ids: list[int] | None = None
    """Only these tokens come."""
    structured_outputs: StructuredOutputs | None = None

    draft_length: Annotated[int | Literal["auto"] | None, BeforeValidator(_draft_length)] = None
    """Most draft tokens a round; 0 does without the draft, auto has the server choose from round to round."""
    acceptance: Literal["match", "ratio", "block"] | None = None
    """Rule by which draft tokens are kept; all are exact."""
    draft_model: str | None = None
    """Drafts only with drafters of this name, or this way of drafting, as "mtp"."""
    priority: int | None = None
    """Lower is served first."""
    timeout: float | None = None
    """Seconds until the request is given up."""

    include_stop_str_in_output: Any = refused("a stop text is never part of the text", False)
    skip_special_tokens: Any = refused("special tokens never give text", True)
    use_beam_search: Any = refused("text is sampled", False)
    truncate_prompt_tokens: Any = refused("a prompt is never cut; /tokenize tells its length", -1)


class Classic(Sampling):
    """What completions and chat completions share, and responses lack."""

    n: int | None = None
    """Completions of the prompt; with a seed, sample 0 is what the seed gives alone."""
    stop: Texts = Field(default_factory=list)
    """Texts that end the completion and are no part of it."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: TokenBiases = Field(default_factory=dict)
    """Added to the logits of these token ids; -100 bans."""
    stream_options: StreamOptions | None = None
    show_tokens: bool | None = None
    """Streams carry each round: token ids, how each came about, times and the proposal."""
    response_format: ResponseFormat | None = None
    prompt_logprobs: int | None = None
    """The likeliest alternatives of each token of the prompt, so many."""

    @model_validator(mode="after")
    def _goes_with_streams(self) -> Classic:
        if self.stream_options is not None and not self.stream:
            raise wrong_field("stream_options", "goes with stream: true only")
        if self.prompt_logprobs is not None and self.stream:
            raise wrong_field("prompt_logprobs", "goes with stream: false only")
        _check_form(self.response_format, self.structured_outputs)
        return self


Prompt = str | list[str] | list[int] | list[list[int]]


def _prompts(value: Any) -> Any:
    """Each prompt as a text or token ids."""
    kinds = {type(item) for item in value} if isinstance(value, list) else set()
    if isinstance(value, str) or kinds == {int}:
        return [value]
    if not kinds or not (kinds == {str} or (kinds == {list} and all(type(i) is int for ids in value for i in ids))):
        raise wrong("it must be a text, a list of texts, a list of token ids or a list of such lists, none empty")
    if len(value) > MAX_PROMPTS:
        raise wrong(f"it has {len(value)} prompts; at most {MAX_PROMPTS} are allowed")
    return value


class CompletionBody(Classic):
    """POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    """A text, token ids, or a list of either; each gets its n choices."""
    max_tokens: int | None = None
    """16 where nothing is said, as with OpenAI."""
    echo: bool | None = None
    """The text starts with the prompt; its tokens have logprobs, too."""
    logprobs: int | None = None
    """The likeliest alternatives of each token, so many; 0 gives the token's own logprob alone."""
    add_special_tokens: Any = refused("a text prompt gets the model's special tokens; send token ids without", True)

    best_of: Any = refused("use n, and choose", 1)
    suffix: Any = refused("the text is written after the prompt only", "")
    length_penalty: Any = refused("it is for beam search", 1.0)


def _content(value: Any) -> Any:
    """A text, or a list of text parts as the text that they make."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong("it must be a text or a list of text parts")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text"):
            raise wrong(f"its part {index} has type {kind!r}; only text is read")
        if not isinstance(part.get("text"), str):
            raise wrong(f"its part {index} has no text")
        texts.append(part["text"])
    return "".join(texts)


Content = Annotated[str | None, BeforeValidator(_content)]


class FunctionCall(Body):
    """What an assistant called."""

    name: str
    arguments: str
    """JSON."""


class ToolCall(Body):
    """A call in the history."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: Any = ignored("models here do not refuse apart from their text")
    audio: Any = refused("only text is read")
    annotations: Any = ignored("models here cite nothing")
    function_call: Any = refused("use tool_calls")

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and not self.tool_calls:
            raise wrong_field("content", "is missing; only an assistant that calls tools may have none")
        if self.tool_calls and self.role != "assistant":
            raise wrong_field("tool_calls", "belongs to messages of the assistant")
        if (self.tool_call_id is not None) is not (self.role == "tool"):
            raise wrong_field("tool_call_id", "belongs to messages of role tool, and to each of them")
        return self


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments; none: any object."""
    strict: bool | None = None
    """True: whatever begins like a call follows the schemas, even where the model may call or not."""


class Tool(Body):
    """A tool; only functions are."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    """A function by its name."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


def _tool_choice(value: Any) -> Any:
    if value is None or value in ("none", "auto", "required") or isinstance(value, NamedTool):
        return value
    try:
        return NamedTool.model_validate(value)
    except ValidationError as error:
        raise wrong("it must be none, auto, required or a function by its name, as OpenAI writes it") from error


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def _check_form(format: ResponseFormat | TextFormat | None, outputs: StructuredOutputs | None) -> None:
    if format is not None and format.type != "text" and outputs is not None:
        raise wrong_field("structured_outputs", "goes with no other form of the text")


def _check_choice(tools: list[Tool], choice: ToolChoice | None) -> None:
    names = {tool.function.name for tool in tools}
    if len(names) < len(tools):
        raise wrong_field("tools", "has two functions of the same name")
    if choice not in (None, "none") and not names:
        raise wrong_field("tool_choice", "goes with tools only")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise wrong_field("tool_choice", f"names {choice.function.name!r}, which tools has not")


class ChatBody(Classic):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    """As many as fit where nothing is said."""
    max_tokens: int | None = None
    """The older name of max_completion_tokens."""
    logprobs: bool | None = None
    """Gives each token's logprob."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """The likeliest alternatives of each token, so many; goes with logprobs."""
    tools: list[Tool] | None = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_tool_choice)] = None
    """auto where there are tools; required and a named function force a call of that form."""
    parallel_tool_calls: bool | None = None
    """False allows one call at most."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template, as ``enable_thinking``."""
    add_generation_prompt: Any = refused("the assistant's answer is what is generated", True)
    continue_final_message: Any = refused("send a plain prompt to /v1/completions", False)
    chat_template: Any = refused("the model's own is used")

    metadata: Any = ignored("nothing is stored")
    store: Any = ignored("nothing is stored")
    service_tier: Any = ignored("there is one; priority orders requests")
    safety_identifier: Any = ignored("nothing is kept per user")
    prompt_cache_key: Any = ignored("every prefix is cached")
    prompt_cache_options: Any = ignored("every prefix is cached")
    prompt_cache_retention: Any = ignored("every prefix is cached")
    prediction: Any = ignored("a hint for speed; the draft predicts")

    audio: Any = refused("only text is generated")
    modalities: Any = refused("only text is generated", ["text"])
    moderation: Any = refused("nothing is moderated")
    functions: Any = refused("use tools", [])
    function_call: Any = refused("use tool_choice")
    reasoning_effort: Any = refused("the model's chat template decides; see chat_template_kwargs")
    verbosity: Any = refused("ask the model for it")
    web_search_options: Any = refused("nothing is searched")

    @model_validator(mode="after")
    def _fits_together(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong_field("top_logprobs", "goes with logprobs: true only")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise wrong_field("max_tokens", "and max_completion_tokens differ; give one of them")
        _check_choice(self.tools or [], self.tool_choice)
        return self


class ResponseFunction(Body):
    """A function that the model may call, as responses write it."""

    type: Literal["function"]
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def tool(self) -> Tool:
        """As chats write it."""
        return Tool(type="function", function=FunctionDefinition(**self.model_dump(exclude={"type"})))


def _response_tool_choice(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"type", "name"}:  # chats nest the name
        value = {"type": value["type"], "function": {"name": value["name"]}}
    return _tool_choice(value)


class TextFormat(Body):
    """What form a response has; OpenAI nests it less deeply than that of a chat."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: Any = ignored("the model does not see it")
    strict: Any = ignored("the text follows the schema in any case")

    @model_validator(mode="after")
    def _has_its_schema(self) -> TextFormat:
        if (self.type == "json_schema") is not (self.schema_ is not None):
            raise wrong_field("schema", "goes with type json_schema, and only with it")
        return self


class ResponseText(Body):
    """How the text of a response looks."""

    format: TextFormat | None = None
    verbosity: Any = refused("ask the model for it")


class ResponseItem(Body):
    """A message, a call of a function or what the function gave, by ``type``."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content = None
    id: Any = ignored("nothing is stored")
    status: Any = ignored("items are complete")
    phase: Any = ignored("chat templates know none")

    @model_validator(mode="after")
    def _has_its_fields(self) -> ResponseItem:
        wanted = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
        }
        for name in ("role", "content", "call_id", "name", "arguments", "output"):
            if (getattr(self, name) is not None) is not (name in wanted[self.type]):
                raise wrong_field(
                    name, f"belongs to some types of items; {self.type} has {', '.join(wanted[self.type])}"
                )
        return self


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponseBody(Sampling):
    """POST /v1/responses."""

    input: Annotated[list[ResponseItem], BeforeValidator(_items)] = Field(min_length=1)
    """A text, or messages, calls and their outputs."""
    instructions: str | None = None
    """A system message before all others."""
    max_output_tokens: int | None = None
    """As many as fit where nothing is said."""
    text: ResponseText | None = None
    tools: list[ResponseFunction] | None = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_response_tool_choice)] = None
    parallel_tool_calls: bool | None = None
    """False allows one call at most."""
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    """Comes back with the answer."""
    include: list[Literal["message.output_text.logprobs"]] | None = None
    """Gives each token's logprob."""
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """The likeliest alternatives of each token, so many; goes with include."""

    store: Any = ignored("nothing is stored")
    service_tier: Any = ignored("there is one; priority orders requests")
    safety_identifier: Any = ignored("nothing is kept per user")
    prompt_cache_key: Any = ignored("every prefix is cached")
    prompt_cache_options: Any = ignored("every prefix is cached")
    prompt_cache_retention: Any = ignored("every prefix is cached")
    stream_options: Any = ignored("chunks are never padded, and usage always comes")

    show_tokens: Any = refused("/v1/chat/completions shows them", False)
    background: Any = refused("answers come at once or as a stream", False)
    background_options: Any = refused("answers come at once or as a stream")
    previous_response_id: Any = refused("nothing is stored; send the whole conversation")
    conversation: Any = refused("nothing is stored; send the whole conversation")
    prompt: Any = refused("nothing is stored; send the whole conversation")
    context_management: Any = refused("a conversation is never cut")
    truncation: Any = refused("a conversation is never cut", "disabled")
    max_tool_calls: Any = refused("it is for tools that OpenAI runs")
    moderation: Any = refused("nothing is moderated")
    reasoning: Any = refused("the model's chat template decides; see chat_template_kwargs")
    access_programs: Any = refused("there are none")
    image: Any = refused("only text is read")

    @model_validator(mode="after")
    def _fits_together(self) -> ResponseBody:
        if self.top_logprobs and not self.include:
            raise wrong_field("top_logprobs", "goes with include: [message.output_text.logprobs] only")
        _check_choice([function.tool for function in self.tools or ()], self.tool_choice)
        _check_form(self.text.format if self.text is not None else None, self.structured_outputs)
        return self


class TokenizeBody(Body):
    """POST /tokenize: exactly one of prompt and messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    """Of a prompt: with the model's special tokens around it, the default; a chat template writes its own."""
    add_generation_prompt: bool = True
    """Of messages: ends with the beginning of the assistant's answer."""
    return_token_strs: bool | None = None
    """Gives the text of each token, too."""
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: Any = refused("send the whole text as prompt", False)
    chat_template: Any = refused("the model's own is used")

    @model_validator(mode="after")
    def _is_one(self) -> TokenizeBody:
        if (self.prompt is None) is (self.messages is None):
            raise wrong_field("prompt", "or messages must be given, and not both")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
