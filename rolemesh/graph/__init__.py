"""The step graph: the calls of a step, their order, and the columns that flow between them.

nodes.py marks the controller's own functions, recording.py runs a page with roles that only record, and
graph.py holds the resulting graph.
"""

from rolemesh.graph.graph import Edge, Node, StepGraph
from rolemesh.graph.nodes import ControllerNode, node, observer
from rolemesh.graph.recording import record

__all__ = ["ControllerNode", "Edge", "Node", "StepGraph", "node", "observer", "record"]
