"""Names of the protos clash in no generated language, and every file has its language options."""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from gradrule.v1 import admin_pb2, blob_pb2, session_pb2

PROTOS = Path(__file__).resolve().parents[2] / "protos"
OWN = sorted((PROTOS / "gradrule" / "v1").glob("*.proto"))


def words(text: str) -> set[str]:
    return set(text.split())


CPP_KEYWORDS = words(
    "alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl concept const "
    "consteval constexpr constinit const_cast continue co_await co_return co_yield decltype default delete do "
    "double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable "
    "namespace new noexcept not not_eq nullptr operator or or_eq private protected public register "
    "reinterpret_cast requires return short signed sizeof static static_assert static_cast struct switch template "
    "this thread_local throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t "
    "while xor xor_eq NULL "
)
JAVA_LANG = words(
    "Appendable AutoCloseable Boolean Byte Character Class Cloneable Comparable Deprecated Double Enum Error "
    "Exception Float Integer Iterable Long Math Module Number Object Override Package Process Readable Record "
    "Runnable Runtime SafeVarargs Short String System Thread Throwable Void "
)
JAVA_GETTERS = words(
    "AllFields CachedSize Class DefaultInstance DefaultInstanceForType Descriptor DescriptorForType "
    "InitializationErrorString OneofFieldDescriptor ParserForType SerializedSize UnknownFields "
)
GO_METHODS = {"Descriptor", "ProtoMessage", "ProtoReflect", "Reset", "String"}
CSHARP_MEMBERS = {
    "CalculateSize",
    "Clone",
    "Descriptor",
    "Equals",
    "GetHashCode",
    "MergeFrom",
    "Parser",
    "ToString",
    "Types",
}


def pascal(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"_|(?<=\d)", name))


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def java_getters(field: FieldDescriptor) -> list[str]:
    """Returns what follows `get` in the Java methods of a field."""
    suffixes = [""]
    if is_map(field):
        suffixes += ["Map", "Count", "OrDefault", "OrThrow"]
    elif field.is_repeated:
        suffixes += ["List", "Count"]
    if field.type == FieldDescriptor.TYPE_STRING:
        suffixes += ["Bytes"]
    elif field.type == FieldDescriptor.TYPE_ENUM:
        suffixes += ["ValueList", "Value"] if field.is_repeated else ["Value"]
    elif field.message_type is not None and not is_map(field):
        suffixes += ["Builder", "OrBuilder"]
        suffixes += ["BuilderList", "OrBuilderList"] if field.is_repeated else []
    return [pascal(field.name) + suffix for suffix in suffixes]


def cpp_methods(field: FieldDescriptor) -> list[str]:
    """Returns the C++ methods of a field."""
    name = field.name
    methods = [name, f"clear_{name}"]
    methods += [f"{name}_size", f"add_{name}"] if field.is_repeated else [f"set_{name}"]
    methods += [f"has_{name}"] if field.has_presence else []
    return [*methods, f"mutable_{name}"]


def clashes_of_message(message: Descriptor) -> Iterator[str]:
    """Returns names of a message that are unusable or renamed in the generated code of some language."""
    where = message.name
    oneofs = [oneof.name for oneof in message.oneofs]
    java = Counter(name for field in message.fields for name in java_getters(field))
    java.update(pascal(oneof) + "Case" for oneof in oneofs)
    java.update(JAVA_GETTERS)
    yield from (f"Java: {where}.get{name}" for name, count in java.items() if count > 1)
    cpp = Counter(name for field in message.fields for name in cpp_methods(field))
    cpp.update(f"{oneof}_case" for oneof in oneofs)
    yield from (f"C++: {where}::{name}" for name, count in cpp.items() if count > 1)
    members = Counter(pascal(field.name) for field in message.fields)
    members.update(pascal(oneof) for oneof in oneofs if not oneof.startswith("_"))
    for name, count in members.items():
        if count > 1 or name in GO_METHODS:
            yield f"Go: {where}.{name}"
        if name == where or name in CSHARP_MEMBERS:
            yield f"C#: {where}.{name}"
    wrappers = {f"{where}_{pascal(field.name)}" for field in message.fields if field.containing_oneof is not None}
    nested = {f"{where}_{inner.name}" for inner in [*message.nested_types, *message.enum_types]}
    yield from (f"Go: {name}" for name in wrappers & nested)
    for field in message.fields:
        if field.name in CPP_KEYWORDS:
            yield f"C++: {where}.{field.name} is a keyword"
        if keyword.iskeyword(field.name):
            yield f"Python: {where}.{field.name} is a keyword"
    for inner in message.nested_types:
        if not inner.GetOptions().map_entry:
            yield from clashes_of_message(inner)


def clashes(file: FileDescriptor) -> list[str]:
    """Returns all clashes in a file."""
    found = [clash for message in file.message_types_by_name.values() for clash in clashes_of_message(message)]
    names = {*file.message_types_by_name, *file.enum_types_by_name, *file.services_by_name}
    found += [f"Java: {name} hides java.lang.{name}" for name in sorted(names & JAVA_LANG)]
    outer = file.GetOptions().java_outer_classname
    if any(name.lower() == outer.lower() for name in names):
        found.append(f"Java: {outer} is the file's class and a message")
    return found


# Importing these modules loads every other file of the package.
LOADED = (admin_pb2, blob_pb2, session_pb2)


def file_of(path: Path) -> FileDescriptor:
    return descriptor_pool.Default().FindFileByName(f"gradrule/v1/{path.name}")


def test_all_files_are_loaded() -> None:
    assert len({file_of(path).name for path in OWN}) == len(OWN) >= 9


@pytest.mark.parametrize("path", OWN, ids=[path.name for path in OWN])
def test_names_clash_in_no_language(path: Path) -> None:
    assert clashes(file_of(path)) == []


@pytest.mark.parametrize("path", OWN, ids=[path.name for path in OWN])
def test_every_file_has_the_options_of_each_language(path: Path) -> None:
    options = file_of(path).GetOptions()
    assert options.java_package == "com.gradrule.v1"
    assert options.java_multiple_files
    assert options.java_outer_classname == f"{path.stem.capitalize()}Proto"
    assert options.go_package == "gradrule/v1;gradrulev1"
    assert options.csharp_namespace == "Gradrule.V1"
    assert options.ruby_package == "Gradrule::V1"


def test_names_of_one_package_differ_by_more_than_case() -> None:
    """Java has one file per message, and some file systems ignore case."""
    names = [name for path in OWN for name in (*file_of(path).message_types_by_name, *file_of(path).enum_types_by_name)]
    names += [file_of(path).GetOptions().java_outer_classname for path in OWN]
    assert [name for name, count in Counter(name.lower() for name in names).items() if count > 1] == []


@pytest.mark.parametrize("path", sorted([*OWN, *(PROTOS / "google").rglob("*.proto")]), ids=lambda path: path.name)
def test_every_import_is_ours_or_comes_with_protoc(path: Path) -> None:
    imports = re.findall(r'^import "(.+)";$', path.read_text(), re.MULTILINE)
    missing = [name for name in imports if not name.startswith("google/protobuf/") and not (PROTOS / name).exists()]
    assert missing == []


INT = FieldDescriptor.TYPE_INT32


def _planted(message: str, *fields: tuple[str, int, bool]) -> FileDescriptor:
    proto = descriptor_pb2.FileDescriptorProto(name="planted.proto", package="planted", syntax="proto3")
    planted = proto.message_type.add(name=message)
    for number, (name, kind, is_repeated) in enumerate(fields, 1):
        label = FieldDescriptor.LABEL_REPEATED if is_repeated else FieldDescriptor.LABEL_OPTIONAL
        planted.field.add(name=name, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(proto)
    return pool.FindFileByName("planted.proto")


@pytest.mark.parametrize(
    ("file", "clash"),
    [
        (_planted("A", ("inline", INT, False)), "C++: A.inline is a keyword"),
        (
            _planted("A", ("tried", INT, True), ("tried_count", FieldDescriptor.TYPE_INT32, False)),
            "Java: A.getTriedCount",
        ),
        (
            _planted("A", ("tried", INT, True), ("tried_size", FieldDescriptor.TYPE_INT32, False)),
            "C++: A::tried_size",
        ),
        (_planted("Override"), "Java: Override hides java.lang.Override"),
        (_planted("Graph", ("graph", INT, False)), "C#: Graph.Graph"),
    ],
)
def test_planted_clash_is_found(file: FileDescriptor, clash: str) -> None:
    assert clash in clashes(file)
