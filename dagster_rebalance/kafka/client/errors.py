# ruff: noqa: SLF001 - the codes of librdkafka's own errors begin with an underscore, and are public
"""The one place where errors of the Kafka client become errors of this package.

Owns what a person is told to do about each of them. Must never swallow an error, and never decide
what the caller does next: that a commit met a rebalance, or that a partition is lost, is told by
the class.
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
from dagster_rebalance.core.model.printable import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from confluent_kafka import Message

    from dagster_rebalance.core.model.offsets import TopicPartition

_Answer = TypeVar("_Answer")

FENCED = frozenset(
    {KafkaError.UNKNOWN_MEMBER_ID, KafkaError.FENCED_MEMBER_EPOCH, KafkaError.FENCED_INSTANCE_ID}
)
"""The broker does not know the member any more."""

FENCED_IN_A_HOLD = FENCED | {KafkaError.ILLEGAL_GENERATION, KafkaError.STALE_MEMBER_EPOCH}
"""During a hold no newer generation is on its way to the client, so a stale one is final too; at
other times it may only be late."""

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
"""What else Apache's clients try again by themselves; librdkafka calls none of these retriable."""
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
UNKNOWN_TO_COMMITS = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.UNKNOWN_TOPIC_ID})
OF_A_TOPIC = UNKNOWN_TO_COMMITS | {KafkaError.TOPIC_AUTHORIZATION_FAILED}
"""The broker refuses the partitions of a topic with it, and answers for other topics."""
OF_A_PARTITION = OF_A_TOPIC | {METADATA_TOO_LARGE}
"""The broker refuses a partition of a commit with it, and stores the others."""
MAY_BE_TOO_LARGE = frozenset(
    {
        KafkaError.UNKNOWN,
        KafkaError.INVALID_COMMIT_OFFSET_SIZE,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
    }
)
"""The broker answers so to a commit above the limit of `__consumer_offsets`; Kafka 4.1 with the
first."""
_NO_CONSUMER_PROTOCOL = frozenset({KafkaError.UNSUPPORTED_VERSION, KafkaError._UNSUPPORTED_FEATURE})

REFUSALS = CREDENTIALS | {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
}
"""Somebody must change a setting or a right."""

_REFUSED_WITHIN_S = 1.0
_LONGEST_S = 2_000_000.0
"""The client counts a time-out in milliseconds of 32 bits: with a longer one it does not wait at
all."""

TROUBLES_KEPT = 20
"""The last ones that a client told are enough to find the cause of a time-out."""

RETRIABLE = _UNREACHABLE | COORDINATOR_MOVES | _LEADER | _BUSY

PASSING = RETRIABLE | {KafkaError._PARTITION_EOF, KafkaError.REBALANCE_IN_PROGRESS}
"""What the client mends by itself while it is polled."""

_VALUE = re.compile(
    r'(?<=^Invalid value) ".*"(?= for configuration property)'
    r"|(?<=Unsupported SASL mechanism): .*$"
    r"|(?<=\") value -?\d+(?= is outside)",
    re.DOTALL,
)
"""The value of a setting in librdkafka's words."""
_NOT_RENEWED = re.compile(
    "Failed to acquire SASL OAUTHBEARER token|Request not valid in current SASL state"
)
"""The client's own words where it could not renew a login."""

UNPARSABLE = frozenset({KafkaError._BAD_MSG, KafkaError._UNDERFLOW})
"""A response that the client does not take; of a connection, if it is in no message."""
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
        "'sasl.password', or what gives the token",
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
        "let the other members move to "
        "'cooperative-sticky' first (docs/upgrading.md), or set 'group.protocol' to what they use"
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
        "the broker cannot take what the client sends, and its log says why: use a version of "
        "confluent-kafka that fits the broker or, for a member, 'group.protocol' 'classic'"
    ),
    KafkaError.INVALID_SESSION_TIMEOUT: (
        "set 'session.timeout.ms' to what the broker allows (its group.min/max.session.timeout.ms)"
    ),
    KafkaError.OFFSET_OUT_OF_RANGE: (
        "records were deleted by retention before they were read: commit an offset that exists"
    ),
    KafkaError._AUTO_OFFSET_RESET: (
        "the log does not have this offset (any more) and 'auto.offset.reset' forbids to choose "
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
        FENCED_IN_A_HOLD,
        "the member was fenced: stop the work on its partitions, and commit nothing for them",
    ),
}


_FATAL_IN_WORDS = {
    "version range is not supported": KafkaError.UNSUPPORTED_ASSIGNOR,
    "not supported": KafkaError.UNSUPPORTED_VERSION,
    "Group authorization failed": KafkaError.GROUP_AUTHORIZATION_FAILED,
    "Topic authorization failed": KafkaError.TOPIC_AUTHORIZATION_FAILED,
    "maximum size": KafkaError.GROUP_MAX_SIZE_REACHED,
    "group id does not exist": KafkaError.GROUP_ID_NOT_FOUND,
    "Invalid request": KafkaError.INVALID_REQUEST,
}


@dataclass(frozen=True, slots=True)
class Attempt:
    """What was tried, for the message.

    Attributes:
        doing: The attempt as a noun: "the commit of 3 partitions of group 'etl'".
        brokers: The brokers that were asked.
    """

    doing: str
    brokers: str

    def explain(self, error: KafkaError, subject: str = "") -> str:
        """The message: what happened, to what, and what to do."""
        code = _cause(error)
        at = f" at {self.brokers}" if code in _UNREACHABLE else ""
        about = f" for {subject}" if subject else ""
        advice = _ADVICE.get(code)
        return f"{self.doing} failed{about}{at}: {said(error)} ({error.name()})" + (
            f"; {advice}" if advice else ""
        )


def said(error: KafkaError) -> str:
    """The text of an error, which may come from a broker."""
    return shown(error.str())


def is_final(error: KafkaError) -> bool:
    """Whether the client that reported it will never work again."""
    return error.fatal() or error.code() == KafkaError._FATAL


def is_login_not_renewed(error: KafkaError) -> bool:
    """Whether a client could not renew its login. It tries again by itself.

    The issuer of tokens gave none; or a connection was to be authenticated twice within a second,
    which Kafka refuses (KIP-368), and which happens while the last token is about to expire. Before
    a first login the same words mean that it is wrong.
    """
    return error.code() == KafkaError._AUTHENTICATION and bool(_NOT_RENEWED.search(error.str()))


def is_passing(error: KafkaError) -> bool:
    """Whether the client mends it by itself, for somebody who has checked the login before."""
    return error.code() in PASSING or is_login_not_renewed(error)


def is_unreadable(message: Message, error: KafkaError) -> bool:
    """Whether a batch of a partition cannot be read, by the client or by the broker.

    An error of no partition counts where the client has dropped a response. Requests that are under
    way fail with that one, and the client reports the reason in its callback.
    """
    return error.code() in (_UNREADABLE if message.topic() else UNPARSABLE)


def kafka_error(exception: KafkaException) -> KafkaError:
    """The error inside an exception of the client."""
    first = exception.args[0] if exception.args else None
    return first if isinstance(first, KafkaError) else KafkaError(KafkaError._FAIL, str(exception))


def broker_error(
    error: KafkaError,
    attempt: Attempt,
    partitions: Iterable[TopicPartition] = (),
    topics: Collection[str] = (),
) -> BrokerError:
    """The error of a request that is not a commit.

    Args:
        error: What the client said.
        attempt: What was tried.
        partitions: The partitions that it failed for.
        topics: The topics that it failed for, if no partitions are known.
    """
    reasons = dict.fromkeys(partitions, said(error))
    return BrokerError(
        attempt.explain(error, names(reasons)),
        retriable=_retriable(error),
        partitions=reasons,
        topics=_refused_topics(error, reasons) or (topics if is_of_a_topic(error) else ()),
    )


def unreadable_error(
    errors: Mapping[TopicPartition, KafkaError],
    offsets: Mapping[TopicPartition, int],
    attempt: Attempt,
    way_out: str,
) -> BrokerError:
    """The error of batches that cannot be read.

    Args:
        errors: What the client reported, by partition.
        offsets: The next offset to be read of each of these partitions.
        attempt: What was tried.
        way_out: What to do.
    """
    reasons = {
        tp: f"{tp} at offset {offsets[tp]}: {said(error)} ({error.name()})"
        for tp, error in sorted(errors.items())
    }
    return BrokerError(
        f"{attempt.doing} failed for {listed(reasons.values())}; the stored data is damaged, or in "
        f"a format that this client does not know. {way_out}",
        partitions=reasons,
    )


def unparsable_error(
    error: KafkaError, offsets: Mapping[TopicPartition, int], attempt: Attempt
) -> BrokerError:
    """The error of a response that a client does not take, with the partitions that it may be of.

    Args:
        error: What the client reported.
        offsets: The next offset of each partition whose records are due.
        attempt: What was tried.
    """
    due = [f"{tp} at offset {offset}" for tp, offset in sorted(offsets.items())]
    about = f"; the response may be of {listed(due)}" if due else ""
    return BrokerError(
        f"{attempt.doing} failed: {said(error)} ({error.name()}){about}",
        partitions=dict.fromkeys(offsets, said(error)),
    )


def commit_error(
    error: KafkaError, attempt: Attempt, partitions: Iterable[TopicPartition], *, holding: bool
) -> BrokerError:
    """The error of a commit. Its class says who owns the partitions now."""
    reasons = dict.fromkeys(partitions, said(error))
    code = error.code()
    message = attempt.explain(error, names(reasons))
    if code in FENCED or (holding and code in FENCED_IN_A_HOLD):
        return PartitionLostError(message, partitions=reasons)
    if code in FENCED_IN_A_HOLD:
        message = (
            f"{attempt.doing} met a rebalance: {said(error)} ({error.name()}); "
            "poll, then commit again if the partitions are still assigned"
        )
        return RebalanceInProgressError(message, partitions=reasons)
    if code == KafkaError.REBALANCE_IN_PROGRESS:
        return RebalanceInProgressError(message, partitions=reasons)
    return BrokerError(
        message,
        retriable=_retriable(error),
        partitions=reasons,
        topics=_refused_topics(error, reasons),
    )


def is_of_a_topic(error: KafkaError) -> bool:
    """Whether the broker refuses a topic, and not the client."""
    return _cause(error) in OF_A_TOPIC


def _refused_topics(error: KafkaError, partitions: Iterable[TopicPartition]) -> frozenset[str]:
    return frozenset(tp.topic for tp in partitions) if is_of_a_topic(error) else frozenset()


def cause_among(troubles: Iterable[KafkaError], error: KafkaError) -> KafkaError:
    """Return the reason behind a time-out, or the error itself.

    A client tells refusals and failed connections through its callbacks only.
    """
    if error.code() not in _UNREACHABLE:
        return error
    known = list(troubles)
    refused = [trouble for trouble in known if trouble.code() in REFUSALS]
    # That all brokers are down follows from how the last one failed, and says less.
    failed = [
        trouble
        for trouble in known
        if trouble.code() in _UNREACHABLE - {KafkaError._ALL_BROKERS_DOWN}
    ]
    return (refused or failed or [error])[-1]


def answered(
    ask: Callable[[float], _Answer], timeout_s: float, cause: Callable[[KafkaError], KafkaError]
) -> _Answer:
    """Ask with a time limit, but stop early when Kafka refused the client.

    The client would go on trying with a wrong password. A time without end is 23 days.

    Raises:
        KafkaException: No answer, or an error.
    """
    first = min(timeout_s, _REFUSED_WITHIN_S)
    try:
        return ask(first)
    except KafkaException as problem:
        error = kafka_error(problem)
        if (
            first == timeout_s
            or error.code() not in _UNREACHABLE
            or cause(error).code() in REFUSALS
        ):
            raise
    return ask(min(timeout_s - first, _LONGEST_S))


def configuration_error(exception: KafkaException | ValueError | TypeError) -> ConfigurationError:
    """Return the error of a client that could not be made from its settings.

    librdkafka's own text names the setting. Its value is left out: it may be a password that stands
    in the wrong place.
    """
    text = kafka_error(exception).str() if isinstance(exception, KafkaException) else str(exception)
    text = _VALUE.sub("", text.strip())
    return ConfigurationError(
        f"the Kafka client refuses its settings: {text}; correct or remove the named setting"
    )


def _retriable(error: KafkaError) -> bool:
    # A broker that has not heard of a new topic yet answers as if there were none (Kafka calls that
    # retriable, librdkafka does not).
    return error.code() in RETRIABLE | UNKNOWN_TOPIC or error.retriable()


def _cause(error: KafkaError) -> int:
    """The code that says what to do.

    Under the code of fatal errors, librdkafka tells the reason in the text only.
    """
    if error.code() == KafkaError._FATAL and "ConsumerGroupHeartbeat" in error.str():
        return next(
            (code for words, code in _FATAL_IN_WORDS.items() if words in error.str()), error.code()
        )
    return error.code()


def names(partitions: Iterable[TopicPartition]) -> str:
    """Partitions for a message; the first few of many."""
    return listed(map(str, sorted(partitions)))


def listed(texts: Iterable[str], most: int = 5) -> str:
    """Texts for a message; the first few of many."""
    each = list(texts)
    return ", ".join(each[:most]) + (f" and {len(each) - most} more" if len(each) > most else "")
