"""The tool calculate: arithmetic with an operator that the policy cannot know, a @ b = 3a - 2b.

verl's example math_expression (recipe/langgraph_agent) uses it.
"""

from __future__ import annotations

import ast

from rolemesh.services.environment.tools.calculator import computed


def calculate(expression: str) -> str:
    """Compute an expression with the operator @, which binds as * does.

    Args:
        expression: Numbers with + - * @ and parentheses, for example 3 @ (9 @ 4).
    """
    return computed(expression, _Spelled().visit)


class _Spelled(ast.NodeTransformer):
    """Writes a @ b as 3 * a - 2 * b."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.MatMult):
            return node
        three = ast.Constant(value=3)
        two = ast.Constant(value=2)
        left = ast.BinOp(left=three, op=ast.Mult(), right=node.left)
        return ast.BinOp(left=left, op=ast.Sub(), right=ast.BinOp(left=two, op=ast.Mult(), right=node.right))
