# ruff: noqa: SLF001 - the codes of librdkafka's own errors begin with an underscore, and are public
"""Convert errors of the Kafka client to errors of this package, each with advice on what to do.

The class of a commit's error shows whether a rebalance is in progress or the partition is lost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from confluent_kafka import KafkaError, KafkaException

from dagster_rebalance.core.model.commit_requests import MAX_METADATA_BYTES
from dagster_rebalance.core.model.errors import (
    BrokerError,
    ConfigurationError,
    PartitionLostError,
    RebalanceInProgressError,
)
from dagster_rebalance.core.model.printable import escaped

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from confluent_kafka import Message

    from dagster_rebalance.core.model.offsets import TopicPartition

_Answer = TypeVar("_Answer")

FENCED = frozenset(
    {KafkaError.UNKNOWN_MEMBER_ID, KafkaError.FENCED_MEMBER_EPOCH, KafkaError.FENCED_INSTANCE_ID}
)
"""The broker has removed the member from the group."""
FENCED_IN_HOLD = FENCED | {KafkaError.ILLEGAL_GENERATION, KafkaError.STALE_MEMBER_EPOCH}
"""During a hold the client receives no newer generation, so a stale one is final too. At other
times the new generation may only be late."""

_UNREACHABLE = frozenset(
    {
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._WAIT_COORD,
    }
)
COORDINATOR_MOVES = frozenset(
    {
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.NOT_COORDINATOR,
    }
)
_LEADER = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.KAFKA_STORAGE_ERROR,
    }
)
_INCONSISTENT_TOPIC_ID = 103
"""confluent-kafka 2.12 has no name for it."""
_BUSY = frozenset(
    {
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KafkaError.UNSTABLE_OFFSET_COMMIT,
        KafkaError.THROTTLING_QUOTA_EXCEEDED,
        KafkaError.UNKNOWN_TOPIC_ID,
        _INCONSISTENT_TOPIC_ID,
        KafkaError._RETRY,
        KafkaError._WAIT_CACHE,
    }
)
"""Apache's clients retry these errors as well; librdkafka does not report them as retriable."""
UNKNOWN_TOPIC = frozenset(
    {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
)
CREDENTIALS = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.ILLEGAL_SASL_STATE,
        KafkaError._SSL,
    }
)
METADATA_TOO_LARGE = KafkaError.OFFSET_METADATA_TOO_LARGE
UNKNOWN_TOPIC_IN_COMMIT = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.UNKNOWN_TOPIC_ID})
TOPIC_ERRORS = UNKNOWN_TOPIC_IN_COMMIT | {KafkaError.TOPIC_AUTHORIZATION_FAILED}
"""The broker refuses the partitions of one topic, and answers for other topics."""
PARTITION_ERRORS = TOPIC_ERRORS | {METADATA_TOO_LARGE}
"""The broker refuses some partitions of a commit, and stores the others."""
REQUEST_TOO_LARGE = frozenset(
    {
        KafkaError.UNKNOWN,
        KafkaError.INVALID_COMMIT_OFFSET_SIZE,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
    }
)
"""Answers to a commit above the limit of `__consumer_offsets`; Kafka 4.1 sends the first."""
_NO_CONSUMER_PROTOCOL = frozenset({KafkaError.UNSUPPORTED_VERSION, KafkaError._UNSUPPORTED_FEATURE})
REFUSALS = CREDENTIALS | {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
}
"""Retrying does not help: a setting or an ACL must change."""
RETRIABLE = _UNREACHABLE | COORDINATOR_MOVES | _LEADER | _BUSY
TRANSIENT = RETRIABLE | {KafkaError._PARTITION_EOF, KafkaError.REBALANCE_IN_PROGRESS}
"""The client recovers from these while it is polled."""
UNPARSABLE = frozenset({KafkaError._BAD_MSG, KafkaError._UNDERFLOW})
"""The client could not parse a response. Without a topic, the error concerns a connection."""
_UNREADABLE = UNPARSABLE | {
    KafkaError._BAD_COMPRESSION,
    KafkaError._NOT_IMPLEMENTED,
    KafkaError.INVALID_MSG,
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.UNKNOWN,
}
ALL_BROKERS_DOWN = KafkaError._ALL_BROKERS_DOWN
END_OF_PARTITION = KafkaError._PARTITION_EOF
LOG_TRUNCATION = KafkaError._LOG_TRUNCATION
OFFSET_RESET_FORBIDDEN = KafkaError._AUTO_OFFSET_RESET
POLLED_TOO_LATE = KafkaError._MAX_POLL_EXCEEDED
NO_LEADER_KNOWN = KafkaError._NOENT
NOT_ANSWERED = KafkaError._TIMED_OUT
NOT_CONNECTED = KafkaError._TRANSPORT
POLL_FIRST = KafkaError._RETRY

_REFUSED_WITHIN_S = 1.0
_LONGEST_S = 2_000_000.0
"""The client has timeouts in milliseconds of 32 bits. With a longer timeout it does not wait."""
RECENT_ERRORS = 20
"""The number of reported errors that a client keeps to find the cause of a timeout."""

_VALUE = re.compile(
    r'(?<=^Invalid value) ".*"(?= for configuration property)'
    r"|(?<=Unsupported SASL mechanism): .*$"
    r"|(?<=\") value -?\d+(?= is outside)",
    re.DOTALL,
)
"""The value of a setting in librdkafka's messages."""
_NOT_RENEWED = re.compile(
    "Failed to acquire SASL OAUTHBEARER token|Request not valid in current SASL state"
    "|FindCoordinator response error: Local: Authentication failure"
)
"""librdkafka's messages for a login that it could not renew."""

_ADVICE: dict[int, str] = {
    **dict.fromkeys(
        _UNREACHABLE,
        "check that the brokers of 'bootstrap.servers' run, can be reached from here, and speak "
        "your 'security.protocol'",
    ),
    **dict.fromkeys(COORDINATOR_MOVES, "the group's coordinator is moving; try again"),
    **dict.fromkeys(_LEADER, "the partition's leader is moving; try again"),
    **dict.fromkeys(UNKNOWN_TOPIC, "create the topic, or correct its name"),
    **dict.fromkeys(
        CREDENTIALS,
        "check 'security.protocol', 'sasl.mechanism', and the login: 'sasl.username' and "
        "'sasl.password', or the source of the token",
    ),
    **dict.fromkeys(
        _NO_CONSUMER_PROTOCOL,
        "the broker lacks the consumer protocol (KIP-848, Kafka 4): set `group_protocol: classic` "
        "(or 'group.protocol')",
    ),
    KafkaError._SSL: (
        "check 'security.protocol', 'ssl.ca.location', 'ssl.certificate.location' and "
        "'ssl.key.location'"
    ),
    KafkaError.TOPIC_AUTHORIZATION_FAILED: (
        "grant the principal the ACL READ, which includes DESCRIBE, on the topic"
    ),
    KafkaError.GROUP_AUTHORIZATION_FAILED: (
        "grant the principal the ACL READ, which includes DESCRIBE, on the group"
    ),
    NO_LEADER_KNOWN: (
        "check that it exists, and that the principal may see it "
        "(ACL READ or DESCRIBE on the topic)"
    ),
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "grant the principal the ACL DESCRIBE on the cluster",
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: (
        "the group is in use with another protocol or assignment strategy: use another 'group.id', "
        "let the other members move to 'cooperative-sticky' first (docs/upgrading.md), or set "
        "'group.protocol' to the protocol of the group"
    ),
    KafkaError.UNSUPPORTED_ASSIGNOR: "set 'group.remote.assignor' to one that the broker offers",
    KafkaError.UNSTABLE_OFFSET_COMMIT: (
        "a producer has sent offsets of this group in a transaction that is still open: they "
        "are read once the producer ends it, or 'transaction.timeout.ms' has passed; "
        "'kafka-transactions.sh find-hanging' finds one that never ends"
    ),
    KafkaError.GROUP_ID_NOT_FOUND: (
        "the coordinator has lost the group, or a group of another type, such as a share group, "
        "has its id: if it lasts, use another 'group.id'"
    ),
    KafkaError.INVALID_GROUP_ID: "use another 'group.id'",
    KafkaError.GROUP_MAX_SIZE_REACHED: (
        "the group is full: run fewer members, or raise the broker's limit for the size of a group"
    ),
    KafkaError.INVALID_REQUEST: (
        "the broker rejects the client's request, and its log has the reason: use a version of "
        "confluent-kafka that is compatible with the broker or, for a member, 'group.protocol' "
        "'classic'"
    ),
    KafkaError.INVALID_SESSION_TIMEOUT: (
        "set 'session.timeout.ms' within the broker's limits (group.min/max.session.timeout.ms)"
    ),
    KafkaError.OFFSET_OUT_OF_RANGE: (
        "records were deleted by retention before they were read: commit an offset that exists"
    ),
    KafkaError._AUTO_OFFSET_RESET: (
        "the log does not have this offset (any more) and 'auto.offset.reset' forbids choosing "
        "one: seek to an offset that exists, or set it to 'earliest' or 'latest'"
    ),
    KafkaError.OFFSET_METADATA_TOO_LARGE: (
        f"a broker with default settings stores at most {MAX_METADATA_BYTES:,} characters of "
        "metadata per partition (its offset.metadata.max.bytes, less 1)"
    ),
    KafkaError._MAX_POLL_EXCEEDED: (
        "`poll` was not called within 'max.poll.interval.ms': call it more often, "
        "or raise the hold limit"
    ),
    KafkaError.REBALANCE_IN_PROGRESS: "the partitions are still yours: poll, then commit again",
    **dict.fromkeys(
        FENCED_IN_HOLD,
        "the member was fenced: stop the work on its partitions, and commit nothing for them",
    ),
}
_FATAL_TEXTS = {
    "version range is not supported": KafkaError.UNSUPPORTED_ASSIGNOR,
    "not supported": KafkaError.UNSUPPORTED_VERSION,
    "Group authorization failed": KafkaError.GROUP_AUTHORIZATION_FAILED,
    "Topic authorization failed": KafkaError.TOPIC_AUTHORIZATION_FAILED,
    "maximum size": KafkaError.GROUP_MAX_SIZE_REACHED,
    "group id does not exist": KafkaError.GROUP_ID_NOT_FOUND,
    "Invalid request": KafkaError.INVALID_REQUEST,
}


@dataclass(frozen=True, slots=True)
class Operation:
    """A request to Kafka, as a noun for messages, and the brokers that receive it."""

    name: str
    brokers: str

    def explain(self, error: KafkaError, subject: str = "") -> str:
        """Return the message of an error: the operation, the cause and the advice."""
        code = _real_code(error)
        at = f" at {self.brokers}" if code in _UNREACHABLE else ""
        about = f" for {subject}" if subject else ""
        advice = _ADVICE.get(code)
        return f"{self.name} failed{about}{at}: {error_text(error)} ({error.name()})" + (
            f"; {advice}" if advice else ""
        )


def error_text(error: KafkaError) -> str:
    """Return the text of an error, safe for a terminal: it may come from a broker."""
    return escaped(error.str())


def is_final(error: KafkaError) -> bool:
    """Return whether the client that reported the error has stopped for good."""
    return error.fatal() or error.code() == KafkaError._FATAL


def is_renewal_failure(error: KafkaError) -> bool:
    """Return whether a client failed to renew its login, which it retries.

    Either the issuer returned no token, or a connection was to authenticate twice within a second,
    which Kafka refuses (KIP-368). The second case occurs while the last token is about to expire.
    The request for the coordinator fails with its connection, whose error is reported before.
    Before the first login, the same errors indicate a wrong login.
    """
    return error.code() == KafkaError._AUTHENTICATION and bool(_NOT_RENEWED.search(error.str()))


def is_transient(error: KafkaError) -> bool:
    """Return whether a client that has logged in once recovers from the error."""
    return error.code() in TRANSIENT or is_renewal_failure(error)


def is_unreadable(message: Message, error: KafkaError) -> bool:
    """Return whether an error means that the client or the broker cannot read a record batch.

    An error without a topic belongs to a request that was in flight when the client dropped a
    response. The client passes the reason to its error callback.
    """
    return error.code() in (_UNREADABLE if message.topic() else UNPARSABLE)


def is_topic_error(error: KafkaError) -> bool:
    """Return whether the broker refuses a topic, and not the client.

    If the client may see no topic of an admin request, it finds no leader.
    """
    return _real_code(error) in TOPIC_ERRORS | {NO_LEADER_KNOWN}


def kafka_error(exception: KafkaException) -> KafkaError:
    """Return the error inside an exception of the client."""
    first = exception.args[0] if exception.args else None
    return first if isinstance(first, KafkaError) else KafkaError(KafkaError._FAIL, str(exception))


def broker_error(
    error: KafkaError,
    operation: Operation,
    partitions: Iterable[TopicPartition] = (),
    topics: Collection[str] = (),
) -> BrokerError:
    """Convert the error of a request for partitions or topics. For commits, use `commit_error`."""
    reasons = dict.fromkeys(partitions, error_text(error))
    return BrokerError(
        operation.explain(error, partition_names(reasons)),
        retriable=_is_retriable(error),
        partitions=reasons,
        topics=_refused_topics(error, reasons) or (topics if is_topic_error(error) else ()),
    )


def unreadable_error(
    errors: Mapping[TopicPartition, KafkaError],
    offsets: Mapping[TopicPartition, int],
    operation: Operation,
    way_out: str,
) -> BrokerError:
    """Return the error for partitions whose record batch at the next offset cannot be read."""
    reasons = {
        tp: f"{tp} at offset {offsets[tp]}: {error_text(error)} ({error.name()})"
        for tp, error in sorted(errors.items())
    }
    return BrokerError(
        f"{operation.name} failed for {first_few(reasons.values())}; the stored data is damaged, "
        f"or in a format that this client does not know. {way_out}",
        partitions=reasons,
    )


def unparsable_error(
    error: KafkaError, offsets: Mapping[TopicPartition, int], operation: Operation
) -> BrokerError:
    """Return the error for a response that the client could not parse.

    `offsets` has the next offset of each partition whose records may have been in the response.
    """
    due = [f"{tp} at offset {offset}" for tp, offset in sorted(offsets.items())]
    about = f"; the response may be of {first_few(due)}" if due else ""
    return BrokerError(
        f"{operation.name} failed: {error_text(error)} ({error.name()}){about}",
        partitions=dict.fromkeys(offsets, error_text(error)),
    )


def commit_error(
    error: KafkaError, operation: Operation, partitions: Iterable[TopicPartition], *, holding: bool
) -> BrokerError:
    """Convert the error of a commit. The class shows whether the partitions are still owned."""
    reasons = dict.fromkeys(partitions, error_text(error))
    code = error.code()
    message = operation.explain(error, partition_names(reasons))
    if code in FENCED or (holding and code in FENCED_IN_HOLD):
        return PartitionLostError(message, partitions=reasons)
    if code in FENCED_IN_HOLD:
        message = (
            f"{operation.name} failed in a rebalance: {error_text(error)} ({error.name()}); "
            "poll, then commit again if the partitions are still assigned"
        )
        return RebalanceInProgressError(message, partitions=reasons)
    if code == KafkaError.REBALANCE_IN_PROGRESS:
        return RebalanceInProgressError(message, partitions=reasons)
    return BrokerError(
        message,
        retriable=_is_retriable(error),
        partitions=reasons,
        topics=_refused_topics(error, reasons),
    )


def root_cause(recent: Iterable[KafkaError], error: KafkaError) -> KafkaError:
    """Return the cause of a timeout, from the errors that the client reported recently.

    A client reports refusals and failed connections only through its callbacks.
    """
    if error.code() not in _UNREACHABLE:
        return error
    known = list(recent)
    refused = [one for one in known if one.code() in REFUSALS]
    # "All brokers down" follows from the failure of the last broker, and has less detail.
    failed = [one for one in known if one.code() in _UNREACHABLE - {ALL_BROKERS_DOWN}]
    return (refused or failed or [error])[-1]


def with_timeout(
    call: Callable[[float], _Answer], timeout_s: float, cause: Callable[[KafkaError], KafkaError]
) -> _Answer:
    """Call a function with a time limit, but stop after a second if Kafka refused the client.

    The client itself would retry with a wrong password. An infinite timeout becomes 23 days.
    """
    first = min(timeout_s, _REFUSED_WITHIN_S)
    try:
        return call(first)
    except KafkaException as problem:
        error = kafka_error(problem)
        if (
            first == timeout_s
            or error.code() not in _UNREACHABLE
            or cause(error).code() in REFUSALS
        ):
            raise
    return call(min(timeout_s - first, _LONGEST_S))


def without_frames(error: BrokerError) -> BrokerError:
    """Remove the tracebacks of an error that is kept, not raised.

    A frame references its callers. If one of their variables has the error, or one of these frames
    raises it, this reference cycle keeps a dropped consumer in its group until Python collects it.
    """
    inner: BaseException | None = error
    while inner is not None:
        inner.__traceback__ = None
        inner = inner.__cause__ or inner.__context__
    return error


def configuration_error(exception: KafkaException | ValueError | TypeError) -> ConfigurationError:
    """Convert the exception from creating a client with invalid settings.

    librdkafka's text names the setting. The value is removed: it may be a misplaced password.
    """
    text = kafka_error(exception).str() if isinstance(exception, KafkaException) else str(exception)
    text = _VALUE.sub("", text.strip())
    return ConfigurationError(
        f"the Kafka client refuses its settings: {text}; correct or remove the named setting"
    )


def partition_names(partitions: Iterable[TopicPartition]) -> str:
    """Return the names of the first few partitions, for a message."""
    return first_few(map(str, sorted(partitions)))


def first_few(texts: Iterable[str], most: int = 5) -> str:
    """Join the first few texts, for a message."""
    each = list(texts)
    return ", ".join(each[:most]) + (f" and {len(each) - most} more" if len(each) > most else "")


def _refused_topics(error: KafkaError, partitions: Iterable[TopicPartition]) -> frozenset[str]:
    return frozenset(tp.topic for tp in partitions) if is_topic_error(error) else frozenset()


def _is_retriable(error: KafkaError) -> bool:
    # A broker without the metadata of a new topic answers as if the topic did not exist. Kafka
    # classifies this error as retriable, librdkafka does not.
    return error.code() in RETRIABLE | UNKNOWN_TOPIC or error.retriable()


def _real_code(error: KafkaError) -> int:
    """Return the code of the cause, which a fatal error has only in its text."""
    if error.code() == KafkaError._FATAL and "ConsumerGroupHeartbeat" in error.str():
        return next(
            (code for text, code in _FATAL_TEXTS.items() if text in error.str()), error.code()
        )
    return error.code()
