"""`dg scaffold defs`: write a commented component file and a function, ready to run.

All names and resource keys derive from the folder's name, so several components can share a code
location.
"""

from __future__ import annotations

import re
from string import Template

import dagster as dg
from pydantic import BaseModel, Field

from dagster_rebalance.core.model.errors import ConfigurationError
from dagster_rebalance.core.model.offsets import is_topic_name

_YAML = Template("""\
type: $type

attributes:
  # The name of the job. Its sensor is called ${name}_batches_sensor: turn it on to join the group.
  name: ${name}_batches

  # The functions or assets that process a batch, by their Python path. The leading dot is this
  # folder. A path without attributes: `- .work.$name`.
  assets:
    - function: .work.$name
      # group_name: sales
      # owners: ["team:sales"]

  # The group to join. All settings of KafkaConsumerResource go here.
  kafka:
    bootstrap_servers: "{{ env.KAFKA_BROKERS }}"
    group_id: "$name"
    topics: ["$topic"]
    # A setting that is exactly one {{ env.NAME }} is read when it is used, and shown nowhere.
    # security_protocol: SASL_SSL
    # sasl_mechanism: SCRAM-SHA-512
    # sasl_username: "{{ env.KAFKA_USERNAME }}"
    # sasl_password: "{{ env.KAFKA_PASSWORD }}"
    # max_records_per_range: 100000

  # With this block, streaming runs process batch after batch. Without it, each batch has a run.
$streaming

  # All settings of KafkaSparkResource. The function then takes `${name}_spark: KafkaSparkResource`.
  # spark:
  #   remote: "{{ env.SPARK_CONNECT_URL }}"

  # All settings of SchemaRegistryResource, for `${name}_registry: SchemaRegistryResource`.
  # registry:
  #   url: "{{ env.SCHEMA_REGISTRY_URL }}"

  # The resource keys of the batch and of the other resources. Each component of a code location
  # needs its own.
  batch_key: ${name}_batch
  kafka_key: ${name}_kafka
  spark_key: ${name}_spark
  registry_key: ${name}_registry

requirements:
  env: [KAFKA_BROKERS]
""")
_STREAMING_YAML = {
    True: {"streaming": "  streaming:\n    runs: 1"},
    False: {"streaming": "  # streaming:\n  #   runs: 1"},
}

_WORK = Template('''\
import dagster as dg

from dagster_rebalance import KafkaBatch


def $name(${name}_batch: KafkaBatch) -> dg.MaterializeResult:
    """Process a batch: read its ranges, and write the output keyed by range."""
    return dg.MaterializeResult(metadata=${name}_batch.metadata())
''')

_PYTHON = Template("""\
import dagster as dg

from dagster_rebalance import KafkaBatchComponent, KafkaConsumerResource
${imports}
from . import work


@dg.component_instance
def load(context: dg.ComponentLoadContext) -> KafkaBatchComponent:
    return KafkaBatchComponent(
        name="${name}_batches",
        assets=[dg.asset(work.$name)],
        kafka=KafkaConsumerResource(
            bootstrap_servers=dg.EnvVar("KAFKA_BROKERS"),
            group_id="$name",
            topics=["$topic"],
        ),
${streaming}        batch_key="${name}_batch",
        kafka_key="${name}_kafka",
        spark_key="${name}_spark",
        registry_key="${name}_registry",
    )
""")
_STREAMING_PYTHON = {
    True: {
        "imports": "from dagster_rebalance.components.component import Streaming\n",
        "streaming": "        streaming=Streaming(runs=1),\n",
    },
    False: {"imports": "", "streaming": ""},
}


class ScaffoldParams(BaseModel):
    """Options of `dg scaffold defs`."""

    topic: str | None = Field(default=None, description="By default the name of the folder.")
    streaming: bool = Field(default=False, description="Whether the runs are streaming runs.")


class KafkaBatchScaffolder(dg.Scaffolder[ScaffoldParams]):
    """Writes `defs.yaml` (or `component.py`) and `work.py`."""

    @classmethod
    def get_scaffold_params(cls) -> type[ScaffoldParams]:
        """Return the model of the options."""
        return ScaffoldParams

    def scaffold(self, request: dg.ScaffoldRequest[ScaffoldParams]) -> None:
        """Write the files into the folder of the component."""
        folder = request.target_path
        topic = request.params.topic or folder.name
        name = re.sub(r"\W", "_", folder.name)
        if "." in folder.name:
            msg = (
                f"Python cannot import from a folder with a dot, such as {folder.name!r}: name the "
                f"folder {name}, and pass --topic {topic}"
            )
            raise ConfigurationError(msg)
        if not is_topic_name(topic):
            msg = f"{topic[:249]!r} cannot be the name of a topic: give one with --topic"
            raise ConfigurationError(msg)
        names = {
            "type": request.type_name,
            "name": f"_{name}" if name[0].isdigit() else name,
            "topic": topic,
        }
        if request.scaffold_format == "yaml":
            file, template, forms = "defs.yaml", _YAML, _STREAMING_YAML
        else:
            file, template, forms = "component.py", _PYTHON, _STREAMING_PYTHON
        text = template.substitute(names, **forms[request.params.streaming])
        (folder / file).write_text(text, encoding="utf-8")
        (folder / "work.py").write_text(_WORK.substitute(names), encoding="utf-8")
