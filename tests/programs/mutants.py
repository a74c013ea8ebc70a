"""Mutants of a file: it, with one thing changed.

Those of cosmic-ray in `OPERATORS`, and those of the four classes below. Left out are
annotations and what is raised, which no result depends on, and mutants that do not
compile or compile to the code of the original or of another mutant.
"""

import ast
import collections
import types

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider

# Of cosmic-ray's, those that a tensor does not refuse, and no second one that says the
# same: a condition that is negated needs no other comparison.
_BINARY = {
    "Add": ("Sub", "Mul"),
    "Sub": ("Add", "Div"),
    "Mul": ("Div", "Add"),
    "Div": ("Mul", "Sub"),
    "FloorDiv": ("Mul", "Mod"),
    "Mod": ("FloorDiv", "Add"),
    "Pow": ("Mul", "Div"),
}
_COMPARISON = {
    "Gt": ("GtE", "NotEq", "LtE"),
    "GtE": ("Gt", "Eq", "Lt"),
    "Lt": ("LtE", "NotEq", "GtE"),
    "LtE": ("Lt", "Eq", "Gt"),
    "Eq": ("NotEq", "GtE", "LtE"),
    "NotEq": ("Eq", "Gt", "Lt"),
    "Is": ("IsNot",),
    "IsNot": ("Is",),
}
OPERATORS = (
    *(f"ReplaceBinaryOperator_{a}_{b}" for a, to in _BINARY.items() for b in to),
    *(f"ReplaceComparisonOperator_{a}_{b}" for a, t in _COMPARISON.items() for b in t),
    "ReplaceUnaryOperator_Delete_USub",
    "ReplaceUnaryOperator_Delete_Not",
    "AddNot",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "NumberReplacer",
    "RemoveDecorator",
    "ZeroIterationForLoop",
)


_FUNCTIONS = """
maximum:minimum minimum:maximum max:min min:max zeros:ones ones:zeros
zeros_like:ones_like ones_like:zeros_like new_ones:new_zeros all:any any:all
equal:not_equal sum:max mean:sum reduce_mean:reduce_sum reduce_sum:reduce_max
mul_:div_ add_:sub_ sub_:add_ addcmul_:addcdiv_ square:abs sqrt:square abs:square
bitwise_xor:bitwise_or bitwise_and:bitwise_or normal:uniform
bitwise_right_shift:bitwise_left_shift sorted:tuple reversed:list
"""


class _CallOperator(Operator):
    """Positions are calls `name(...)` or `module.name(...)`, by name and arguments."""

    def mutation_positions(self, node):
        called = _called(node)
        if called and self.applies(*called):
            yield node.start_pos, node.end_pos

    @classmethod
    def examples(cls):
        return ()


class ReplaceFunction(_CallOperator):
    """Another function with the same arguments."""

    BY = dict(pair.split(":") for pair in _FUNCTIONS.split())

    def applies(self, name, arguments):
        return name.value in self.BY

    def mutate(self, node, index):
        name, _ = _called(node)
        name.value = self.BY[name.value]
        return node


class DropCall(_CallOperator):
    """The first argument alone."""

    NAMES = {
        *("cast", "stop_gradient", "relu", "abs", "square", "sqrt", "sign", "log"),
        *("logical_not", "transpose", "squeeze", "broadcast_to", "clip", "repeat"),
    }

    def applies(self, name, arguments):
        return name.value in self.NAMES and arguments

    def mutate(self, node, index):
        _, arguments = _called(node)
        return parso.parse(f" ({arguments[0].get_code().strip()})")


class SwapWhere(_CallOperator):
    """The second and third argument of `where` in each other's place."""

    def applies(self, name, arguments):
        return name.value == "where" and len(arguments) == 3

    def mutate(self, node, index):
        _, (_, second, third) = _called(node)
        children = second.parent.children
        i, j = children.index(second), children.index(third)
        children[i], children[j] = third, second
        return node


class DropKeyword(Operator):
    """A call without one of its keyword arguments."""

    def mutation_positions(self, node):
        is_call = node.parent and node.parent.type in ("arglist", "trailer")
        if node.type == "argument" and is_call and node.children[1].type == "operator":
            yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        return parso.parse(" **{}")

    @classmethod
    def examples(cls):
        return ()


def _called(node):
    """The name leaf of the function that a node calls, and the arguments, or `None`."""
    if node.type != "atom_expr" or len(node.children) < 2:
        return None
    *_, name, call = node.children
    if call.type != "trailer" or call.children[0].value != "(":
        return None
    if name.type == "trailer" and name.children[0].value == ".":
        name = name.children[1]
    if name.type != "name":
        return None
    inside = call.children[1:-1]
    if inside and inside[0].type == "arglist":
        inside = [c for c in inside[0].children if c.type != "operator"]
    return name, inside


def mutants(path, code):
    """Every mutant of a file: dicts with its place, both lines, tests' lines, code."""
    tree, positions = ast.parse(code), get_ast(code)
    ignored, seen, nth = _ignored(tree), {_signature(code)}, collections.Counter()
    provider = OperatorProvider()
    operators = {name: provider[name]() for name in OPERATORS}
    own = (ReplaceFunction, DropCall, SwapWhere, DropKeyword)
    operators |= {cls.__name__: cls() for cls in own}
    found = []
    for name, operator in operators.items():
        places = [
            # The `*` of a parameter list is an operator too, and `/` is another one.
            None if getattr(node.parent, "type", "") == "parameters" else start
            for node in ast_nodes(positions)
            for start, _ in operator.mutation_positions(node)
        ]
        for occurrence, place in enumerate(places):
            line = place and place[0]
            if not line or line in ignored:
                continue
            mutated = mutate_code(code, operator, occurrence)
            if _signature(mutated) in seen | {None}:
                continue
            seen.add(_signature(mutated))
            pair = _changed(code, mutated)
            nth[name, *pair] += 1
            found.append(
                {
                    "file": path,
                    "line": line,
                    "operator": name,
                    "old": pair[0],
                    "new": pair[1],
                    "nth": nth[name, *pair],
                    "lines": _lines_of_statement(tree, line),
                    "code": mutated,
                }
            )
    return sorted(found, key=lambda m: (m["line"], m["operator"], m["nth"]))


def _ignored(tree):
    """Lines of annotations in classes, and of what is raised."""
    kinds = ast.Raise | ast.AnnAssign
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return {i for node in nodes for i in range(node.lineno, node.end_lineno + 1)}


def _signature(code):
    """What a file compiles to, without line numbers; `None` where it does not."""

    def of(code):
        if not isinstance(code, types.CodeType):
            return repr(code)
        constants = tuple(map(of, code.co_consts))
        return code.co_code, code.co_names, code.co_varnames, code.co_flags, constants

    try:
        return of(compile(code, "", "exec", dont_inherit=True))
    except SyntaxError:
        return None


def _changed(old, new):
    """What differs between two texts: the changed lines of each, stripped."""
    old, new = old.splitlines(), new.splitlines()
    while old and new and old[0] == new[0]:
        old, new = old[1:], new[1:]
    while old and new and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    return tuple(" ".join(" ".join(lines).split()) for lines in (old, new))


def _lines_of_statement(tree, line):
    """Lines that run where the statement of `line` does.

    Of a function's header, those of its body; of the module's own statements, none.
    """

    def inside(node):
        first = min([node.lineno, *(d.lineno for d in _decorators(node))])
        return first <= line <= node.end_lineno

    statement, body = None, tree.body
    while found := [node for node in body if inside(node)]:
        statement = found[0]
        blocks = ("body", "orelse", "finalbody", "handlers")
        body = [n for block in blocks for n in getattr(statement, block, [])]
    functions = ast.FunctionDef | ast.Lambda
    enclosed = any(
        isinstance(node, functions) and node.lineno < statement.lineno
        for node in ast.walk(tree)
        if isinstance(node, functions) and node.end_lineno >= statement.end_lineno
    )
    if isinstance(statement, functions):
        return [statement.body[0].lineno, statement.end_lineno]
    if not enclosed:
        return None
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if body else statement.end_lineno
    return [statement.lineno, max(last, statement.lineno)]


def _decorators(node):
    return getattr(node, "decorator_list", ())
