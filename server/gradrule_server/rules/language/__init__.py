"""Parses expressions of the rule language and converts them to graphs; see docs/reference/expression-language.md."""

from gradrule_server.rules.language.lowering import lower as lower
from gradrule_server.rules.language.parse import parse as parse
from gradrule_server.rules.language.syntax_tree import Formula as Formula
from gradrule_server.rules.language.syntax_tree import split_variable as split_variable
