//! Logs and traces: lines for people or JSON, and spans to an OTLP collector if one is configured.

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::WithExportConfig as _;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tidepool_metadata::ErrorKind;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

use crate::config::{LogFormat, Telemetry};
use crate::error::Error;

/// Keeps the exporter alive; flushes it when dropped.
pub struct Guard(Option<SdkTracerProvider>);

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(provider) = self.0.take() {
            // The collector may be gone; the process ends all the same.
            let _flushed = provider.shutdown();
        }
    }
}

/// Installs the process's subscriber. Logs go to standard error. With an OTLP endpoint this needs a tokio runtime.
///
/// # Errors
/// A filter that can't be read, an exporter that can't be built, a subscriber that is installed already.
pub fn install(settings: &Telemetry) -> Result<Guard, Error> {
    let invalid = |field: &'static str, what: String| {
        Error::new(ErrorKind::Invalid, "BAD_CONFIG", format!("{field}: {what}")).field(field)
    };
    let filter =
        EnvFilter::try_new(&settings.log_filter).map_err(|error| invalid("telemetry.log_filter", error.to_string()))?;
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_target(false);
    let lines = match settings.log_format {
        LogFormat::Human => lines.boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    let provider = settings.otlp_endpoint.as_deref().map(exporter).transpose();
    let provider = provider.map_err(|what| invalid("telemetry.otlp_endpoint", what))?;
    let spans =
        provider.as_ref().map(|provider| tracing_opentelemetry::layer().with_tracer(provider.tracer("tidepool")));
    tracing_subscriber::registry()
        .with(filter)
        .with(lines)
        .with(spans)
        .try_init()
        .map_err(|error| Error::new(ErrorKind::Internal, "INTERNAL", error.to_string()))?;
    Ok(Guard(provider))
}

fn exporter(endpoint: &str) -> Result<SdkTracerProvider, String> {
    let exporter = opentelemetry_otlp::SpanExporter::builder().with_tonic().with_endpoint(endpoint).build();
    let exporter = exporter.map_err(|error| error.to_string())?;
    let resource = opentelemetry_sdk::Resource::builder().with_service_name("tidepool").build();
    Ok(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build())
}
