"""Clients that other people wrote, in a loop with two tools: at once, streamed, and with drafts.

    python .ci/clients.py [PYTHON [FOLDER]]

PYTHON: an interpreter with some of their packages (default: this one); FOLDER: where npm has
installed those that are in JavaScript. A client that cannot be imported is left out, and said. Each
asks for a call, which is required, runs the function, sends the result back, and gets a text. What
a client makes of the protocol is its own: so each is a program as its documentation writes it.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import which
from typing import Literal

ROOT = Path(__file__).parent.parent
ASKED = "Tom saw a dog."
MOST = 90  # tokens


CALLED: list[str] = []  # what has been run


def say(word: Literal["dog", "cat"]) -> str:
    """Says a word."""
    CALLED.append("say")
    return f"said {word}"


def add(a: Literal[1, 2], b: Literal[3, 4]) -> str:
    """Adds two numbers."""
    CALLED.append("add")
    return f"the sum is {a + b}"


FUNCTIONS = {"say": say, "add": add}
PARAMETERS = {
    "say": {"word": {"enum": ["dog", "cat"]}},
    "add": {"a": {"enum": [1, 2]}, "b": {"enum": [3, 4]}},
}
TOOLS = []
for name, properties in PARAMETERS.items():
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    function = {"name": name, "parameters": parameters | {"additionalProperties": False}}
    TOOLS.append({"type": "function", "function": function})


def run(name: str, arguments: dict) -> str:
    return FUNCTIONS[name](**arguments)


# ---- Clients: each returns the text at the end


def use_openai(base: str, streams: bool) -> str:
    import openai

    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    messages = [{"role": "user", "content": ASKED}]
    how = dict(model=model_of(base), tools=TOOLS, max_tokens=MOST, temperature=0)
    for choice in ("required", "none"):
        asked = how | dict(messages=messages, tool_choice=choice)
        if streams:
            with client.chat.completions.stream(**asked) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        messages.append(message.model_dump())  # as it is, with all that the package adds
        for call in message.tool_calls or ():
            told = run(call.function.name, json.loads(call.function.arguments))
            messages.append(dict(role="tool", tool_call_id=call.id, content=told))
    return message.content


def use_litellm(base: str, streams: bool) -> str:
    import litellm

    messages = [{"role": "user", "content": ASKED}]
    how = dict(model=f"openai/{model_of(base)}", api_base=base, api_key="none", tools=TOOLS)
    for choice in ("required", "none"):
        asked = how | dict(messages=messages, tool_choice=choice, max_tokens=MOST, temperature=0)
        answer = litellm.completion(stream=streams, **asked)
        if streams:
            answer = litellm.stream_chunk_builder([*answer], messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump())
        for call in message.tool_calls or ():
            told = run(call.function.name, json.loads(call.function.arguments))
            messages.append(dict(role="tool", tool_call_id=call.id, content=told))
    return message.content


def use_langchain(base: str, streams: bool) -> str:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    how = dict(model=model_of(base), base_url=base, api_key="none", max_tokens=MOST, temperature=0)
    messages = [HumanMessage(ASKED, name="tom")]
    for choice in ("required", "none"):
        model = ChatOpenAI(**how).bind_tools(TOOLS, tool_choice=choice)
        message = None
        for part in model.stream(messages) if streams else [model.invoke(messages)]:
            message = part if message is None else message + part
        messages.append(message)
        for call in message.tool_calls:
            told = run(call["name"], call["args"])
            messages.append(ToolMessage(told, tool_call_id=call["id"], name=call["name"]))
    return message.content


def use_pydantic_ai(base: str, streams: bool) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(model_of(base), provider=OpenAIProvider(base_url=base, api_key="none"))

    def settings(context: object) -> dict:
        """A call is required first, and then none."""
        more = {"tool_choice": "none" if CALLED else "required"}
        return dict(max_tokens=MOST, temperature=0, extra_body=more)

    agent = Agent(model, model_settings=settings)

    for each in FUNCTIONS.values():
        agent.tool_plain(each)

    async def ask() -> str:
        async with agent.iter(ASKED) as loop:
            async for node in loop:
                if streams and Agent.is_model_request_node(node):
                    async with node.stream(loop.ctx) as stream:
                        async for _ in stream:
                            pass
            return loop.result.output

    return asyncio.run(ask())


def use_agents(base: str, streams: bool) -> str:
    import openai
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0)
    model = OpenAIChatCompletionsModel(model_of(base), openai_client=client)
    settings = ModelSettings(tool_choice="required", max_tokens=MOST, temperature=0)

    tools = [function_tool(each) for each in FUNCTIONS.values()]
    agent = Agent("tom", model=model, tools=tools, model_settings=settings)

    async def ask() -> str:
        if not streams:
            return (await Runner.run(agent, ASKED, max_turns=3)).final_output
        result = Runner.run_streamed(agent, ASKED, max_turns=3)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(ask())


def use_instructor(base: str, streams: bool) -> str:
    import instructor
    import openai
    from pydantic import BaseModel, ConfigDict

    class Said(BaseModel):
        model_config = ConfigDict(extra="forbid")  # a tiny model would go on for long
        word: Literal["dog", "cat"]

    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    how = dict(model=model_of(base), messages=[{"role": "user", "content": ASKED}])
    how |= dict(response_model=Said, max_tokens=MOST, temperature=0, max_retries=0)
    told = []
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        patched = instructor.from_openai(client, mode=mode)
        if streams:
            *_, answer = patched.chat.completions.create_partial(**how)
        else:
            answer = patched.chat.completions.create(**how)
        told.append(answer.word)
    CALLED.append("word")
    return " ".join(told)


def use_llama_index(base: str, streams: bool) -> str:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=model_of(base),
        api_base=base,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=MOST,
        temperature=0,
    )
    tools = [FunctionTool.from_defaults(each) for each in FUNCTIONS.values()]
    messages = [ChatMessage(role="user", content=ASKED)]
    for choice in ("required", "none"):
        asked = dict(chat_history=messages, tool_choice=choice, strict=True)
        if streams:
            *_, answer = model.stream_chat_with_tools(tools, **asked)
        else:
            answer = model.chat_with_tools(tools, **asked)
        messages.append(answer.message)
        for call in model.get_tool_calls_from_response(answer, error_on_no_tool_call=False):
            told = run(call.tool_name, call.tool_kwargs)
            more = {"tool_call_id": call.tool_id, "name": call.tool_name}
            messages.append(ChatMessage(role="tool", content=told, additional_kwargs=more))
    return answer.message.content


def use_autogen(base: str, streams: bool) -> str:
    from autogen_core import CancellationToken
    from autogen_core.models import (
        AssistantMessage,
        FunctionExecutionResult,
        FunctionExecutionResultMessage,
        UserMessage,
    )
    from autogen_core.tools import FunctionTool
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info = dict(vision=False, function_calling=True, json_output=True, family="unknown")
    client = OpenAIChatCompletionClient(
        model=model_of(base),
        base_url=base,
        api_key="none",
        model_info=info | {"structured_output": True},
        max_tokens=MOST,
        temperature=0,
    )
    tools = [FunctionTool(each, each.__doc__, strict=True) for each in FUNCTIONS.values()]

    async def ask() -> str:
        messages = [UserMessage(content=ASKED, source="tom")]
        for choice in ("required", "none"):
            how = dict(tools=tools, tool_choice=choice, cancellation_token=CancellationToken())
            if streams:
                async for part in client.create_stream(messages, **how):
                    answer = part
            else:
                answer = await client.create(messages, **how)
            messages.append(AssistantMessage(content=answer.content, source="bob"))
            results = []
            for call in answer.content if isinstance(answer.content, list) else ():
                told = run(call.name, json.loads(call.arguments))
                result = dict(content=told, call_id=call.id, is_error=False, name=call.name)
                results.append(FunctionExecutionResult(**result))
            if results:
                messages.append(FunctionExecutionResultMessage(content=results))
        return answer.content

    return asyncio.run(ask())


AI_SDK = """
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

const { base, model, streams, functions, asked, most } = JSON.parse(process.argv[1]);
const called = [];
const run = {
  say: ({ word }) => `said ${word}`,
  add: ({ a, b }) => `the sum is ${a + b}`,
};
const tools = {};
for (const { name, parameters } of functions) {
  const execute = async (input) => (called.push(name), run[name](input));
  tools[name] = tool({ inputSchema: jsonSchema(parameters), execute });
}
const how = {
  model: createOpenAICompatible({ name: "llama", baseURL: base })(model),
  prompt: asked,
  tools,
  maxOutputTokens: most,
  temperature: 0,
  maxRetries: 0,
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
};
let result;
if (streams) {
  result = streamText({ ...how, onError: ({ error }) => { throw error; } });
  for await (const part of result.fullStream) if (part.type === "error") throw part.error;
} else {
  result = await generateText(how);
}
console.log(JSON.stringify({ called, text: await result.text }));
"""
NODE = ["node", "--input-type=module", "--eval"]


def use_ai_sdk(base: str, streams: bool) -> str:
    """In JavaScript, in the folder where npm has installed it."""
    functions = [each["function"] for each in TOOLS]
    asked = dict(base=base, model=model_of(base), streams=streams, functions=functions)
    given = json.dumps(asked | dict(asked=ASKED, most=MOST))
    told = json.loads(subprocess.check_output([*NODE, AI_SDK, given], cwd=os.environ["FOLDER"]))
    CALLED.extend(told["called"])
    return told["text"]


def model_of(base: str) -> str:
    """The name of the server's model."""
    from urllib.request import urlopen

    return json.load(urlopen(f"{base}/models"))["data"][0]["id"]


CLIENTS = {
    "openai": use_openai,
    "litellm": use_litellm,
    "langchain_openai": use_langchain,
    "pydantic_ai": use_pydantic_ai,
    "agents": use_agents,
    "instructor": use_instructor,
    "llama_index.llms.openai_like": use_llama_index,
    "autogen_ext.models.openai": use_autogen,
    "@ai-sdk/openai-compatible": use_ai_sdk,
}


# ---- The check


def is_installed(name: str, python: str) -> bool:
    """Whether it can be imported: in JavaScript, if its name begins with @."""
    command = [python, "-c", f"import {name}"]
    folder = None
    if name.startswith("@"):
        if not which("node"):
            return False
        command = [*NODE, f"import 'ai'; import '{name}'"]
        folder = os.environ["FOLDER"]
    return subprocess.run(command, capture_output=True, cwd=folder).returncode == 0


def main(python: str = sys.executable, folder: str = ".") -> int:
    os.environ["FOLDER"] = folder
    sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]
    from server_reference import server

    from testing.tools import with_tools

    present = [name for name in CLIENTS if is_installed(name, python)]
    for name in CLIENTS:
        if name not in present:
            print(f"{name} is not installed: left out")
    faults = 0
    with tempfile.TemporaryDirectory() as work:
        target = with_tools(Path(work) / "tiny", is_tagged=True)
        for draft in ([], ["--draft", "ngram"]):
            with server("--target", str(target), *draft) as (_, port):
                for name in present:
                    base = f"http://127.0.0.1:{port}/v1"
                    done = subprocess.run(
                        [python, __file__, "--use", name, base], capture_output=True, text=True
                    )
                    faults += done.returncode != 0
                    told = done.stdout if done.returncode == 0 else done.stderr[-1500:]
                    print(f"{name} {' '.join(draft)}: {told.strip()}", flush=True)
    return faults


if __name__ == "__main__":
    if sys.argv[1:2] == ["--use"]:
        for streams in (False, True):
            CALLED.clear()
            text = CLIENTS[sys.argv[2]](sys.argv[3], streams)
            assert CALLED and text, (CALLED, text)
            print(f"{' '.join(CALLED)}, streamed {streams}: {text[:30]!r};", end=" ")
        sys.exit()
    sys.exit(main(*sys.argv[1:]))
