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

from collections.abc import Sequence

from app.fields import ChatMessage
from errors import UserError, brief
from request import Message

Calls = list[tuple[str, int, str]]  # ids, places in their answer, functions


def read_conversation(messages: Sequence[ChatMessage], one_call: bool) -> list[Message]:
    """The messages for the template. one_call: a message may have one call at most."""
    keyed = []  # turns with their places: message, call of this message, is it a result?
    last = 0  # the message before the results
    waiting: Calls = []  # for results, those of the last answer first
    for n, message in enumerate(messages):
        turn = turn_of(f"messages[{n}]", message)
        if turn["role"] == "tool":
            place = bind(f"messages[{n}].tool_call_id", turn, waiting)
            keyed.append(((last, place, True), turn))
            continue
        last = n
        keyed.append(((n, 0, False), turn))
        calls = turn.get("tool_calls", [])
        if calls:
            waiting = [call for call in waiting if call[0]]
        for place, call in reversed([*enumerate(calls)]):
            waiting.insert(0, (call["id"], place, call["function"]["name"]))
            if one_call and place > 0:
                part = {"role": "assistant", "content": "", "tool_calls": [call]}
                keyed.append(((n, place, False), part))
        if one_call and calls:
            turn["tool_calls"] = calls[:1]
    keyed.sort(key=lambda pair: pair[0])
    return [turn for _, turn in keyed]


def bind(where: str, result: Message, waiting: Calls) -> int:
    """The place of the call that this is the result of, which is then the last one that waits; the
    result gets the name of its function."""
    wanted = result.get("tool_call_id", "")
    for n, (id, place, function) in enumerate(waiting):
        if id == wanted or not (id and wanted):
            waiting.append(waiting.pop(n))
            result.setdefault("name", function)
            return place
    if wanted:
        shown = brief(repr(wanted), 100)
        raise UserError(f"{where} is {shown}: no call before it has this id", where)
    return 0


def turn_of(where: str, message: ChatMessage) -> Message:
    """One message. UserError if it has no content, and needs one."""
    if message.role != "assistant" and "content" not in message.model_fields_set:
        where = f"{where}.content"
        raise UserError(f"{where} is missing", where)
    turn = {name: value for name, value in message.model_dump().items() if value}
    turn["role"] = "system" if message.role == "developer" else message.role
    texts = [part.text for part in message.content]
    turn["content"] = "\n".join(texts)
    thoughts = turn.pop("reasoning", "")
    if thoughts:
        turn.setdefault("reasoning_content", thoughts)
    return turn
