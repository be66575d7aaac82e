"""Parses expressions of the rule language and converts them to graphs; see docs/reference/expression-language.md."""

from gradrule_server.rules.language.formula import Formula as Formula
from gradrule_server.rules.language.formula import parse as parse
from gradrule_server.rules.language.lowering import lower as lower
