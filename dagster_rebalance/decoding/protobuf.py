"""Protobuf: which column a message becomes, and how a payload is read into it.

Owns the columns of Protobuf's types. A payload is read by the reader's message, as Protobuf means
it; the writer's schema tells which message it is, and another one is refused.
"""

from __future__ import annotations

import base64
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import UndecodableError
from dagster_rebalance.decoding import columns
from dagster_rebalance.decoding.columns import Inside
from dagster_rebalance.decoding.wire_format import frame_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dagster_rebalance.decoding.columns import Column
    from dagster_rebalance.decoding.schema import SchemaText

_FILE = "registered.proto"
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_SCALARS = {
    "bool": columns.BOOLEAN,
    "bytes": columns.BINARY,
    "double": columns.DOUBLE,
    "float": columns.FLOAT,
    "string": columns.STRING,
    **dict.fromkeys(("int32", "sint32", "sfixed32"), columns.INT),
    **dict.fromkeys(("int64", "sint64", "sfixed64", "uint32", "fixed32"), columns.LONG),
    **dict.fromkeys(("uint64", "fixed64"), columns.decimal(20, 0)),
}
_FREE = {"google.protobuf.Struct", "google.protobuf.Value", "google.protobuf.ListValue"}
_WRAPPERS = {
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
}


def reader(
    schema: SchemaText, writer: Callable[[int], SchemaText], message: str
) -> tuple[Column, Callable[[bytes], Any]]:
    """The column of a message, and what decodes a payload into it.

    Args:
        schema: The reader's.
        writer: Finds the schema with an id.
        message: The full name of the message; the first one of the schema if empty.

    Raises:
        UndecodableError: The schema cannot be used, or has no such message.
    """
    from google.protobuf.message_factory import GetMessageClass

    file = _file(schema)
    descriptor = _found(file, message) if message else _at(file, (0,))
    column = _message(descriptor, Inside())
    make = GetMessageClass(descriptor)
    writers: dict[int, Any] = {}

    def decode(payload: bytes) -> Any:
        frame = frame_of(payload, has_indexes=True)
        if frame.schema_id not in writers:
            writers[frame.schema_id] = _file(writer(frame.schema_id))
        written = _at(writers[frame.schema_id], frame.indexes).full_name
        if written != descriptor.full_name:
            msg = f"it is a message {written}, and {descriptor.full_name} is asked for"
            raise UndecodableError(msg)
        try:
            return make.FromString(payload[frame.starts_at :])
        except Exception as problem:
            msg = f"it is no message {written}: {type(problem).__name__}"
            raise UndecodableError(msg) from problem

    return column, decode


def _file(schema: SchemaText) -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    pool = descriptor_pool.DescriptorPool()
    try:
        for name, text in (*schema.references, (_FILE, schema.text)):
            file = descriptor_pb2.FileDescriptorProto.FromString(
                base64.b64decode(text, validate=True)
            )
            file.name = name
            pool.Add(file)
        return pool.FindFileByName(_FILE)
    except Exception as problem:
        msg = f"not a Protobuf schema that can be used: {type(problem).__name__} {problem}"
        raise UndecodableError(msg) from problem


def _found(file: Any, name: str) -> Any:
    try:
        return file.pool.FindMessageTypeByName(name)
    except KeyError as problem:
        known = ", ".join(one.full_name for one in file.message_types_by_name.values())
        msg = f"the schema has no message {name}; it has {known}"
        raise UndecodableError(msg) from problem


def _at(file: Any, indexes: Sequence[int]) -> Any:
    found: Any = None
    inner = list(file.message_types_by_name.values())
    for index in indexes:
        if not 0 <= index < len(inner):
            msg = f"its message indexes {list(indexes)} lead to no message of the schema"
            raise UndecodableError(msg)
        found = inner[index]
        inner = list(found.nested_types)
    return found


def _message(descriptor: Any, inside: Inside) -> Column:
    name = descriptor.full_name
    if name == "google.protobuf.Timestamp":
        return columns.TIMESTAMP.by(_time)
    if name in _WRAPPERS:
        return _field(descriptor.fields_by_name["value"], inside).by(lambda one: one.value)
    if name in _FREE or name in inside or not descriptor.fields:
        return columns.STRING.by(_json)
    within = inside.within(name)
    fields = [(field.name, _whole_field(field, within)) for field in descriptor.fields]
    getters = [
        (field.name, _getter(field, column.convert))
        for field, (_, column) in zip(descriptor.fields, fields, strict=True)
    ]

    def of_message(message: Any) -> dict[str, Any]:
        return {name: get(message) for name, get in getters}

    return columns.struct(fields).by(of_message)


def _getter(field: Any, convert: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    name, has_presence = field.name, field.has_presence and not _is_repeated(field)

    def get(message: Any) -> Any:
        # By its type: a field may be called HasField.
        if has_presence and not type(message).HasField(message, name):
            return None
        value = getattr(message, name)
        return value if convert is None else convert(value)

    return get


def _whole_field(field: Any, inside: Inside) -> Column:
    if not _is_repeated(field):
        return _field(field, inside)
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        return columns.mapping(_field(key, inside), _field(value, inside))
    item = columns.array(_field(field, inside))
    return item if item.convert else item.by(list)


def _field(field: Any, inside: Inside) -> Column:
    inside.count()
    if field.message_type is not None:
        return _message(field.message_type, inside)
    if field.enum_type is not None:
        # Of several names of one number (allow_alias), the first one counts, as in Protobuf's JSON.
        names = {one.number: one.name for one in reversed(field.enum_type.values)}
        return columns.STRING.by(lambda number: names.get(number, str(number)))
    return _SCALARS[_kind(field)]


def _kind(field: Any) -> str:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto

    return str(FieldDescriptorProto.Type.Name(field.type)).removeprefix("TYPE_").lower()


def _is_repeated(field: Any) -> bool:
    # Protobuf 7 has taken `label` away; versions before 6.31 had nothing else.
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == field.LABEL_REPEATED)


def _time(message: Any) -> datetime:
    return _EPOCH + timedelta(seconds=message.seconds, microseconds=message.nanos // 1000)


def _json(message: Any) -> str:
    from google.protobuf.json_format import MessageToJson

    return str(MessageToJson(message, preserving_proto_field_name=True, indent=None))
