"""A conversation, as chat templates want it: a list of messages with one text each.

A client may run the functions that an answer has called side by side, and send their results as
they end. Only their ids say which call each result belongs to. But most templates leave ids out,
and pair calls and results by place:

    calls  add (c1), say (c2)     results  of c2, of c1     →     results  of c1, of c2

So one pass over the whole conversation brings results into the order of their calls, and gives each
result the name of its function. An id that no call has is refused. Where calls or results have no
ids, or several calls have one, results come in the order of the calls.

Some templates have one call in a message. For them an answer with several calls becomes several
answers, each followed by its result. Everything else that a client says of a message (its speaker's
name, the thoughts of an answer) is handed to the template, which may read it or not.
"""

from collections import defaultdict
from collections.abc import Sequence

from app.asgi import HttpError
from app.fields import ChatMessage
from errors import brief
from request import Message


def read_conversation(messages: Sequence[ChatMessage], one_call: bool) -> list[Message]:
    """The messages for the template. one_call: a message may have one call at most."""
    keyed = []  # turns with their places: message, call of this message, is it a result?
    last = 0  # the message before the results
    # id -> its calls: their places, their functions; None -> all calls of the last answer
    waiting: dict[str | None, list[tuple[int, str]]] = {}
    for n, message in enumerate(messages):
        turn = turn_of(f"messages[{n}]", message)
        if turn["role"] == "tool":
            place = bind(f"messages[{n}]", turn, waiting)
            keyed.append(((last, place, True), turn))
            continue
        last = n
        keyed.append(((n, 0, False), turn))
        calls = turn.get("tool_calls", [])
        by_id = defaultdict(list)
        for place, call in enumerate(calls):
            by_id[call["id"]].append((place, call["function"]["name"]))
            by_id[None].append((place, call["function"]["name"]))
            if one_call and place > 0:
                part = {"role": "assistant", "content": "", "tool_calls": [call]}
                keyed.append(((n, place, False), part))
        if calls:
            waiting |= {"": []} | by_id
        if one_call and calls:
            turn["tool_calls"] = calls[:1]
    keyed.sort(key=lambda pair: pair[0])
    return [turn for _, turn in keyed]


def bind(where: str, result: Message, waiting: dict[str | None, list[tuple[int, str]]]) -> int:
    """The place of the call that this is the result of; the result gets the name of its function.
    waiting: calls by their ids; a call leaves it with its result, unless it is the only one."""
    id = result["tool_call_id"]
    calls = waiting.get(id or None) or waiting.get("")  # the calls have no ids
    if not calls and id:
        where = f"{where}.tool_call_id"
        message = f"{where} is {brief(repr(id), 100)}: no call before it has this id"
        raise HttpError(400, message, param=where)
    if not calls:
        return 0
    place, name = calls[0]
    if len(calls) > 1:
        calls.pop(0)
    result["name"] = result["name"] or name
    return place


def turn_of(where: str, message: ChatMessage) -> Message:
    """One message. HttpError if it has no content, and needs one."""
    role = "system" if message.role == "developer" else message.role
    if role != "assistant" and "content" not in message.model_fields_set:
        where = f"{where}.content"
        raise HttpError(400, f"{where} is missing", param=where)
    texts = [part.text for part in message.content]
    read: Message = {"role": role, "content": "\n".join(texts)}
    if role == "tool":
        read |= {"tool_call_id": message.tool_call_id, "name": message.name}
    elif message.name:
        read["name"] = message.name
    thoughts = message.reasoning_content or message.reasoning
    if thoughts.strip():
        read["reasoning_content"] = thoughts
    if message.tool_calls:
        read["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    return read
