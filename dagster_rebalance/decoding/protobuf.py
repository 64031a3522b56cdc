"""Protobuf: the column of a message, and the decoding of payloads into it.

The reader's message parses each payload by Protobuf's own rules. The writer's schema only
identifies the message of a payload; another message is refused.
"""

from __future__ import annotations

import base64
from datetime import datetime, timedelta, timezone
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dagster_rebalance.core.model.errors import UndecodableError
from dagster_rebalance.decoding import columns
from dagster_rebalance.decoding.columns import Nesting
from dagster_rebalance.decoding.wire_format import parse_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dagster_rebalance.decoding.columns import Column, DecodeMany
    from dagster_rebalance.decoding.wire_format import Frame, SchemaText

    _Get = Callable[[Any], Any]
    """Returns the value of a field of a message, for Arrow."""
    _Part = tuple[str, Column, _Get]

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


def open_reader(
    schema: SchemaText, writer: Callable[[int], SchemaText], message: str
) -> tuple[Column, Callable[[bytes], Any], DecodeMany]:
    """Return the column of a message, a function that decodes, and one for columns.

    The default of `message` is the first message of the schema.
    """
    from google.protobuf.message_factory import GetMessageClass

    file = _load_file(schema)
    descriptor = _message_by_name(file, message) if message else _message_at(file, (0,))
    column = _message_column(descriptor, Nesting())
    is_struct = column.ddl.startswith("STRUCT")
    parts = _message_parts(descriptor, Nesting().within(descriptor.full_name)) if is_struct else []
    message_class = GetMessageClass(descriptor)
    writers: dict[int, Any] = {}

    def parse(payload: bytes) -> Frame:
        """Return the frame of a payload; raise UndecodableError if it is of another message."""
        frame = parse_frame(payload, has_indexes=True)
        if frame.schema_id not in writers:
            writers[frame.schema_id] = _load_file(writer(frame.schema_id))
        written = _message_at(writers[frame.schema_id], frame.indexes).full_name
        if written != descriptor.full_name:
            msg = f"it is a message {written}, and {descriptor.full_name} is expected"
            raise UndecodableError(msg)
        return frame

    def decode(payload: bytes) -> Any:
        frame = parse(payload)
        try:
            return message_class.FromString(payload[frame.starts_at :])
        except Exception as problem:
            msg = f"it is not a message {descriptor.full_name}: {type(problem).__name__}"
            raise UndecodableError(msg) from problem

    def decode_many(payloads: Any) -> tuple[Any, Sequence[int]] | None:
        import pyarrow.compute as pc

        first = payloads[0].as_py()
        starts_at = parse(first).starts_at
        frames = pc.binary_slice(payloads, 0, starts_at)
        if not parts or not pc.all(pc.equal(frames, first[:starts_at])).as_py():
            return None
        data = pc.binary_replace_slice(payloads, 0, starts_at, b"")
        return _read_many(data.to_pylist(), message_class, parts)

    return column, decode, decode_many


def _read_many(
    payloads: Sequence[bytes], message_class: Any, parts: Sequence[_Part]
) -> tuple[Any, Sequence[int]] | None:
    """Return messages as an array, and its rows that have to be decoded otherwise."""
    import pyarrow as pa

    parse = message_class.FromString
    messages, doubtful = [], []
    for row, data in enumerate(payloads):
        try:
            messages.append(parse(data))
        except Exception:  # noqa: BLE001, PERF203 - the other decoder finds the reason
            messages.append(message_class())
            doubtful.append(row)
    try:
        arrays = [pa.array(list(map(get, messages)), column.arrow()) for _, column, get in parts]
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - a value does not fit its column
        return None
    return pa.StructArray.from_arrays(arrays, names=[name for name, *_ in parts]), doubtful


def _load_file(schema: SchemaText) -> Any:
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
        msg = f"unusable Protobuf schema: {type(problem).__name__} {problem}"
        raise UndecodableError(msg) from problem


def _message_by_name(file: Any, name: str) -> Any:
    try:
        return file.pool.FindMessageTypeByName(name)
    except KeyError as problem:
        known = ", ".join(one.full_name for one in file.message_types_by_name.values())
        msg = f"the schema has no message {name}; it has {known}"
        raise UndecodableError(msg) from problem


def _message_at(file: Any, indexes: Sequence[int]) -> Any:
    descriptor: Any = None
    nested = list(file.message_types_by_name.values())
    for index in indexes:
        if not 0 <= index < len(nested):
            msg = f"its message indexes {list(indexes)} lead to no message of the schema"
            raise UndecodableError(msg)
        descriptor = nested[index]
        nested = list(descriptor.nested_types)
    return descriptor


def _message_column(descriptor: Any, nesting: Nesting) -> Column:
    name = descriptor.full_name
    if name == "google.protobuf.Timestamp":
        return columns.TIMESTAMP.converted_by(_to_datetime)
    if name in _WRAPPERS:
        wrapped = _value_column(descriptor.fields_by_name["value"], nesting)
        return wrapped.converted_by(lambda one: one.value)
    if name in _FREE or name in nesting or not descriptor.fields:
        return columns.STRING.converted_by(_to_json)
    parts = _message_parts(descriptor, nesting.within(name))

    def convert(message: Any) -> dict[str, Any]:
        return {name: get(message) for name, _, get in parts}

    return columns.struct([part[:2] for part in parts]).converted_by(convert)


def _message_parts(descriptor: Any, nesting: Nesting) -> list[_Part]:
    """Return the name, the column and the getter of each field."""
    fields = [(field, _field_column(field, nesting)) for field in descriptor.fields]
    return [(field.name, column, _getter(field, column.convert)) for field, column in fields]


def _getter(field: Any, convert: Callable[[Any], Any] | None) -> _Get:
    name, has_presence = field.name, field.has_presence and not _is_repeated(field)
    if not has_presence and convert is None:
        return attrgetter(name)

    def get(message: Any) -> Any:
        # Called on the type, because a field may be named HasField.
        if has_presence and not type(message).HasField(message, name):
            return None
        value = getattr(message, name)
        return value if convert is None else convert(value)

    return get


def _field_column(field: Any, nesting: Nesting) -> Column:
    if not _is_repeated(field):
        return _value_column(field, nesting)
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        return columns.mapping(_value_column(key, nesting), _value_column(value, nesting))
    items = columns.array(_value_column(field, nesting))
    return items if items.convert else items.converted_by(list)


def _value_column(field: Any, nesting: Nesting) -> Column:
    nesting.count_column()
    if field.message_type is not None:
        return _message_column(field.message_type, nesting)
    if field.enum_type is not None:
        # With allow_alias, the first name of a number counts, as in Protobuf's JSON.
        names = {one.number: one.name for one in reversed(field.enum_type.values)}
        return columns.STRING.converted_by(lambda number: names.get(number, str(number)))
    return _SCALARS[_type_name(field)]


def _type_name(field: Any) -> str:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto

    return str(FieldDescriptorProto.Type.Name(field.type)).removeprefix("TYPE_").lower()


def _is_repeated(field: Any) -> bool:
    # Protobuf 7 removed `label`; versions before 6.31 have only that.
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == field.LABEL_REPEATED)


def _to_datetime(message: Any) -> datetime:
    return _EPOCH + timedelta(seconds=message.seconds, microseconds=message.nanos // 1000)


def _to_json(message: Any) -> str:
    from google.protobuf.json_format import MessageToJson

    return str(MessageToJson(message, preserving_proto_field_name=True, indent=None))
