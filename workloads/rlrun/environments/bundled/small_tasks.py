"""Bundled environments with small generated tasks: `arithmetic`, `calculator` and `reverse-text`.

Arithmetic of a model is never executed as code. The text is parsed into Python's syntax tree. Only numbers, `+ - * / // % **`, signs and
parentheses are evaluated; other nodes (names, calls, attributes, texts) and expensive or large results are errors.

`arithmetic`: for the prompt "3+4=" the right reply is "7".

`calculator`: multi-turn environment with a tool in plain text.

    user       12*34-5=
    assistant  calc(12*34-5)
    user       403
    assistant  403

A reply that contains `calc(...)` is a call: the environment answers with the result, or with "error: ..." for an invalid expression. The
first reply without a call is the final answer, which is scored.

`reverse-text`: for the prompt "<abcd>" the right reply is "dcba". A tiny model improves on it within a minute.
"""

from __future__ import annotations

import ast
import math
import operator
import random
from collections.abc import Callable, Sequence

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rlrun.environments.protocol import Episode, Message, ModelClient, Score, SingleTurnEnvironment, Split, Task
from rlrun.environments.splits import GeneratedTasks

MAX_CHARS = 200
MAX_BITS = 256
"""Largest size of an integer in bits, for literals and results: about 77 digits."""

Number = int | float

_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


class ExpressionError(ValueError):
    """Error for an invalid expression. The message is a reason that can be shown to a model."""


def evaluate_text(text: str) -> str:
    """Return the value of an expression as text: "2*(3+4)" -> "14", "1/4" -> "0.25", "6/3" -> "2".

    Integers are exact; other numbers have ten significant digits. Raises `ExpressionError`.
    """
    text = text.strip()
    if not text:
        raise ExpressionError("empty expression")
    if len(text) > MAX_CHARS:
        raise ExpressionError(f"longer than {MAX_CHARS} characters")
    if not text.isascii() or not text.isprintable():
        raise ExpressionError("not plain text")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ExpressionError("not an expression") from None
    return _format_number(_node_value(tree.body))


def _node_value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bound_number(number)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _node_value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_node_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _apply_operator(type(op), _node_value(left), _node_value(right))
    raise ExpressionError("only numbers, + - * / // % ** and parentheses")


def _apply_operator(op: type[ast.operator], left: Number, right: Number) -> Number:
    # Powers are checked before the computation, which could be huge; the size of the result follows from the operands.
    if op is ast.Pow and isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > 2 * MAX_BITS:
        raise ExpressionError("number too large")
    try:
        result = _OPERATORS[op](left, right)
    except ZeroDivisionError:
        raise ExpressionError("division by zero") from None
    except OverflowError:
        raise ExpressionError("number too large") from None
    if isinstance(result, complex):
        raise ExpressionError("not a real number")
    return _bound_number(result)


def _bound_number(number: Number) -> Number:
    if not math.isfinite(number) if isinstance(number, float) else number.bit_length() > MAX_BITS:
        raise ExpressionError("number too large")
    return number


def _format_number(number: Number) -> str:
    if isinstance(number, float) and number.is_integer() and abs(number) < 1e15:
        number = int(number)
    return str(number) if isinstance(number, int) else format(number, ".10g")


def position_score(text: str, answer: str) -> float:
    """Return the share of right positions, in [0, 1]: `#{i: text[i] == answer[i]} / max(len(text), len(answer))`.

    White space around the text is ignored. Missing and additional characters count as wrong positions, so text after the right answer
    reduces the score: for the answer "dcba", "dcba" scores 1, "dc" 1/2, "dcbadcba" 1/2 and "" 0.
    """
    text = text.strip()
    return sum(a == b for a, b in zip(text, answer, strict=False)) / max(len(text), len(answer))


def check_operations(operations: str) -> str:
    """Validate the operations of generated problems: some of `+`, `-`, `*`, each once. Raises ValueError."""
    if set(operations) - set("+-*") or len(set(operations)) != len(operations):
        raise ValueError("use some of '+', '-' and '*', each at most once, as in '+-'")
    return operations


def draw_expression(rng: random.Random, *, terms: int, operations: str, max_operand: int) -> str:
    """Return a random expression of `terms` integers in [0, max_operand], such as "3+4": no spaces, usual precedence."""
    text = str(rng.randint(0, max_operand))
    for _ in range(terms - 1):
        text += rng.choice(operations) + str(rng.randint(0, max_operand))
    return text


class ArithmeticArgs(BaseModel):
    """Arguments of `arithmetic`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    operations: str = Field(default="+-", min_length=1)
    """Operations of the problems, out of `+`, `-` and `*`."""
    max_operand: int = Field(default=9, ge=1, le=10**9)
    """Largest operand; the smallest is 0."""
    terms: int = Field(default=2, ge=2, le=4)
    """Operands in one problem."""
    partial_credit: bool = False
    """False: 1 for the right number, else 0. True: the share of right characters, position by position."""
    seed: int = 0
    """Seed of the generated tasks."""
    num_tasks: int = Field(default=10_000, ge=1)
    """Tasks in each split. Problems repeat if there are more tasks than problems."""

    _operations = field_validator("operations")(check_operations)


class Arithmetic(SingleTurnEnvironment):
    """Work out "3+4=" (single turn); the reward is 1 for the right number, else 0 (or partial credit)."""

    id = "arithmetic"

    def __init__(self, args: ArithmeticArgs) -> None:
        self.args = args

    def tasks(self, split: Split) -> Sequence[Task]:
        return GeneratedTasks(
            split, count=self.args.num_tasks, seed=self.args.seed, draw=self._draw_problem, make=self._make_task
        )

    def _draw_problem(self, rng: random.Random) -> str:
        args = self.args
        return draw_expression(rng, terms=args.terms, operations=args.operations, max_operand=args.max_operand)

    @staticmethod
    def _make_task(task_id: str, expression: str) -> Task:
        return Task(
            id=task_id, prompt=[{"role": "user", "content": f"{expression}="}], answer=evaluate_text(expression)
        )

    async def score(self, task: Task, episode: Episode) -> Score:
        assert task.answer is not None
        positions = position_score(episode.last_reply, task.answer)
        exact = float(positions == 1.0)
        return Score(reward=positions if self.args.partial_credit else exact, metrics={"exact": exact})

    def demonstration(self, task: Task) -> list[Message]:
        return [{"role": "assistant", "content": task.answer}]


INSTRUCTIONS = (
    "Work out the expression. To use the calculator, reply with calc(...), for example calc(2*(3+4)); "
    "the next message is its result. When you know the answer, reply with the number alone."
)
CALL = "calc("


class CalculatorArgs(BaseModel):
    """Arguments of `calculator`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_turns: int = Field(default=4, ge=2, le=64)
    """Largest number of replies per episode, including calls and the final answer."""
    operations: str = Field(default="+-*", min_length=1)
    """Operations of the problems, out of `+`, `-` and `*`."""
    max_operand: int = Field(default=99, ge=1, le=10**9)
    """Largest operand; the smallest is 0."""
    terms: int = Field(default=3, ge=2, le=8)
    """Operands in one problem."""
    call_credit: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Reward of an episode with a wrong or missing final answer in which a call returned the right number. It is a first step for a model
    that cannot copy the result yet."""
    instructions: bool = True
    """Start with a system message that explains the calculator. Turn it off for a tiny model with a warm-up."""
    seed: int = 0
    """Seed of the generated tasks."""
    num_tasks: int = Field(default=10_000, ge=1)
    """Tasks in each split. Problems repeat if there are more tasks than problems."""

    _operations = field_validator("operations")(check_operations)


def find_call(text: str) -> str | None:
    """Return the expression of the first `calc(...)` in a reply, or None if there is no call. Without a closing parenthesis, the
    expression ends with the text."""
    start = text.find(CALL)
    if start < 0:
        return None
    start += len(CALL)
    depth = 1
    for end in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return text[start:]


def answer_call(expression: str) -> str:
    """Return the calculator's answer: the value, or "error: ..."."""
    try:
        return evaluate_text(expression)
    except ExpressionError as error:
        return f"error: {error}"


class Calculator:
    """Work out an expression with a calculator (multi-turn, tool); the reward is 1 for the right final number."""

    id = "calculator"

    def __init__(self, args: CalculatorArgs) -> None:
        self.args = args

    def tasks(self, split: Split) -> Sequence[Task]:
        return GeneratedTasks(
            split, count=self.args.num_tasks, seed=self.args.seed, draw=self._draw_problem, make=self._make_task
        )

    def _draw_problem(self, rng: random.Random) -> str:
        args = self.args
        return draw_expression(rng, terms=args.terms, operations=args.operations, max_operand=args.max_operand)

    def _make_task(self, task_id: str, expression: str) -> Task:
        prompt: list[Message] = [{"role": "system", "content": INSTRUCTIONS}] if self.args.instructions else []
        prompt.append({"role": "user", "content": f"{expression}="})
        return Task(id=task_id, prompt=prompt, answer=evaluate_text(expression), info={"expression": expression})

    async def run(self, task: Task, model: ModelClient) -> Episode:
        messages = list(task.prompt)
        calls = errors = 0
        found = truncated = False
        replies = 0
        for replies in range(1, self.args.max_turns + 1):
            reply = await model.complete(messages)
            messages.append(reply.message)
            truncated = reply.truncated
            expression = find_call(reply.text)
            if expression is None or truncated:
                break
            result = answer_call(expression)
            calls += 1
            errors += result.startswith("error")
            found = found or result == task.answer
            if replies < self.args.max_turns:
                messages.append({"role": "user", "content": result})
        return Episode(
            messages=messages,
            replies=replies,
            info={"calls": calls, "errors": errors, "found": found, "truncated": truncated},
        )

    async def score(self, task: Task, episode: Episode) -> Score:
        exact = episode.last_reply.strip() == task.answer
        reward = 1.0 if exact else self.args.call_credit if episode.info["found"] else 0.0
        return Score(
            reward=reward,
            metrics={
                "exact": float(exact),
                "calls": float(episode.info["calls"]),
                "call_errors": float(episode.info["errors"]),
            },
        )

    def demonstration(self, task: Task) -> list[Message]:
        return [
            {"role": "assistant", "content": f"{CALL}{task.info['expression']})"},
            {"role": "user", "content": task.answer},
            {"role": "assistant", "content": task.answer},
        ]


class ReverseTextArgs(BaseModel):
    """Arguments of `reverse-text`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    length: int = Field(default=4, ge=1, le=256)
    """Characters to reverse."""
    letters: str = Field(default="abcdef", min_length=2, max_length=90)
    """Alphabet: printable ASCII without white space, `<` and `>`, each character once."""
    seed: int = 0
    """Seed of the generated tasks."""
    num_tasks: int = Field(default=10_000, ge=1)
    """Tasks in each split. Texts repeat if there are more tasks than texts."""

    @field_validator("letters")
    @classmethod
    def _check_letters(cls, letters: str) -> str:
        bad = sorted({c for c in letters if not "!" <= c <= "~" or c in "<>"})
        if bad:
            raise ValueError(f"contains {bad}: use printable ASCII without white space, '<' and '>'")
        if len(set(letters)) != len(letters):
            raise ValueError("contains a character twice; use each one once")
        return letters


class ReverseText(SingleTurnEnvironment):
    """Reverse a short text (single turn); the reward is the share of positions that are right."""

    id = "reverse-text"

    def __init__(self, args: ReverseTextArgs) -> None:
        self.args = args

    def tasks(self, split: Split) -> Sequence[Task]:
        return GeneratedTasks(
            split, count=self.args.num_tasks, seed=self.args.seed, draw=self._draw_problem, make=self._make_task
        )

    def _draw_problem(self, rng: random.Random) -> str:
        return "".join(rng.choice(self.args.letters) for _ in range(self.args.length))

    @staticmethod
    def _make_task(task_id: str, text: str) -> Task:
        return Task(id=task_id, prompt=[{"role": "user", "content": f"<{text}>"}], answer=text[::-1])

    async def score(self, task: Task, episode: Episode) -> Score:
        assert task.answer is not None
        reward = position_score(episode.last_reply, task.answer)
        return Score(reward=reward, metrics={"exact": float(reward == 1.0)})

    def demonstration(self, task: Task) -> list[Message]:
        return [{"role": "assistant", "content": task.answer}]
