"""The step graph: which call of a step runs after which, and the columns that flow between them.

nodes.py marks what the controller computes itself, recording.py runs a page with roles that only record, and
graph.py is what comes of it.
"""

from rolemesh.graph.graph import Edge, Node, StepGraph
from rolemesh.graph.nodes import ControllerNode, node, observer
from rolemesh.graph.recording import record

__all__ = ["ControllerNode", "Edge", "Node", "StepGraph", "node", "observer", "record"]
