"""The expression language: a line of text over x, y, dy, default, params → a graph. See docs/expression-language.md."""

from gradrule_server.rules.language.formula import Formula as Formula
from gradrule_server.rules.language.formula import parse as parse
from gradrule_server.rules.language.lowering import lower as lower
