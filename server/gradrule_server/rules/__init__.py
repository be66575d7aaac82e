"""Converts rules to graphs: expressions, rules given as graphs, and the catalogue. Imports no TensorFlow."""

from gradrule_server.rules.graph_rule import CheckedGraph as CheckedGraph
from gradrule_server.rules.params import Param as Param
from gradrule_server.rules.params import read_param_value as read_param_value
from gradrule_server.rules.params import write_param as write_param
from gradrule_server.rules.params import write_param_value as write_param_value
from gradrule_server.rules.rule import RuleContent as RuleContent
from gradrule_server.rules.rule import has_graph as has_graph
from gradrule_server.rules.signature import RuleGraph as RuleGraph
from gradrule_server.rules.signature import Signature as Signature
from gradrule_server.rules.signature import salt_for as salt_for
