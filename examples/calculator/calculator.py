"""The agent's tool: exact arithmetic on an expression; no other Python is evaluated."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

MAX_EXPRESSION = 100
MAX_MAGNITUDE = 10**15
EXPRESSION_CHARACTERS = re.compile(r"[0-9+\-*/(). ]+")

BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class MalformedExpression(ValueError):
    """A text is not an expression that this calculator reads."""


class CalculationError(ArithmeticError):
    """An expression was read, but has no result, such as a division by zero."""


def calculator(expression: str) -> str:
    """Work out an expression of numbers, + - * / and parentheses, exactly."""
    value = evaluate(parse_expression(expression))
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.6f}".rstrip("0").rstrip(".")


def parse_expression(expression: str) -> ast.expr:
    # Length and characters are checked first: no name, call, power of ten or deep nesting
    # reaches the parser at all.
    if len(expression) > MAX_EXPRESSION:
        raise MalformedExpression(f"longer than {MAX_EXPRESSION} characters")
    if not EXPRESSION_CHARACTERS.fullmatch(expression):
        raise MalformedExpression("only numbers, + - * / and parentheses are read")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise MalformedExpression("not an expression") from error
    check_grammar(tree)
    return tree


def check_grammar(node: ast.expr) -> None:
    """Refuse Python syntax that this calculator does not read, such as ** and //."""
    match node:
        case ast.Constant(value=int() | float()):
            return
        case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
            check_grammar(operand)
        case ast.BinOp(left=left, op=binary, right=right) if type(binary) in BINARY:
            check_grammar(left)
            check_grammar(right)
        case _:
            raise MalformedExpression("only numbers, + - * / and parentheses are read")


def evaluate(node: ast.expr) -> Fraction:
    value = Fraction(0)
    match node:
        case ast.Constant(value=int() | float() as number):
            value = Fraction(str(number))
        case ast.UnaryOp(op=op, operand=operand):
            value = UNARY[type(op)](evaluate(operand))
        case ast.BinOp(left=left, op=binary, right=right):
            try:
                value = BINARY[type(binary)](evaluate(left), evaluate(right))
            except ZeroDivisionError as error:
                raise CalculationError("division by zero") from error
    if abs(value) > MAX_MAGNITUDE:
        raise CalculationError("the result is too large")
    return value
