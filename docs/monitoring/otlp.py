"""Send metrics to a collector, from any number of processes."""

import os
import socket

from opentelemetry import metrics
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

resource = Resource.create(
    {"service.name": "shop", "service.instance.id": f"{socket.gethostname()}-{os.getpid()}"}
)
reader = PeriodicExportingMetricReader(OTLPMetricExporter())  # OTEL_EXPORTER_OTLP_ENDPOINT
metrics.set_meter_provider(MeterProvider([reader], resource))
