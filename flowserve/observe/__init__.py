"""Statistics, metrics and traces.

Decides: what is counted (`statistics`, `traffic`), names and units of metrics (`deployment_metrics`, `machine`,
`model_metrics`), the contents of a trace and its formats (`trace`, `trace_file`, `otel`, `server_timing`, `timeline`),
and the settings that clients can change (`trace_settings`, `settings`).

Does not know: when something happens. `runtime` calls the counters and fills the traces; `http` and `grpc` show them.
It reads no clock: times come in as nanoseconds.

Callers: `runtime`, `http`, `grpc`, `cli`, test tools.
"""
