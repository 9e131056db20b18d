//! Admin HTTP: JSON of what operators ask, metrics, health, and a page for people.

mod cluster;
mod metrics;
pub mod report;
mod rows;
mod tasks;
mod tenants;
mod types;

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use tidepool_metadata::{ErrorKind, ObjectKey};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::auth::Auth;
use crate::config::Size;
use crate::disk::Disk;
use crate::error::Error;
use crate::folder::DataFolder;
use crate::node::{NodeService, ObjectName};
use report::{AttachRequest, InfoReport, NvmeReport, ObjectReport, RecoveryReport, TiersReport};

/// What the handlers need. Cheap to clone.
#[derive(Clone)]
pub struct AdminApi {
    inner: Arc<Inner>,
}

struct Inner {
    service: NodeService,
    auth: Auth,
    ready: watch::Receiver<bool>,
    folder: Arc<DataFolder>,
    grpc: SocketAddr,
    disk: Disk,
    metrics: metrics::Metrics,
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        (self.http_status(), Json(self.to_json())).into_response()
    }
}

impl AdminApi {
    /// Adapts `service`.
    #[must_use]
    pub(crate) fn new(
        service: NodeService,
        auth: Auth,
        ready: watch::Receiver<bool>,
        folder: Arc<DataFolder>,
        grpc: SocketAddr,
        disk: Disk,
    ) -> Self {
        let metrics = metrics::Metrics::new(service.clone());
        Self { inner: Arc::new(Inner { service, auth, ready, folder, grpc, disk, metrics }) }
    }

    /// All routes. Health needs no secret: it says nothing that the port's being open does not.
    pub fn router(self) -> Router {
        let protected = Router::new()
            .route("/", get(page))
            .route("/v1/tiers", get(tiers))
            .route("/v1/recovery", get(recovery))
            .route("/v1/objects", get(object))
            .route("/v1/info", get(info))
            .route("/v1/raft", get(cluster::raft))
            .route("/v1/raft/remove", post(cluster::remove))
            .route("/v1/raft/promote", post(cluster::promote))
            .route("/v1/raft/transfer-leader", post(cluster::transfer))
            .route("/v1/raft/snapshot", post(cluster::snapshot))
            .route("/v1/nodes", get(cluster::nodes))
            .route("/v1/nodes/drain", post(cluster::drain))
            .route("/v1/nodes/undrain", post(cluster::undrain))
            .route("/v1/nodes/remove", post(cluster::remove_node))
            .route("/v1/repair", get(cluster::repair))
            .route("/v1/rebuild", get(cluster::rebuild))
            .route("/v1/rebuild/finish", post(cluster::finish_rebuild))
            .route("/v1/leases", get(cluster::leases))
            .route("/v1/types", get(types::types))
            .route("/v1/types/set", post(types::set))
            .route("/v1/tenants", get(tenants::tenants))
            .route("/v1/tenants/create", post(tenants::create))
            .route("/v1/tenants/quota", post(tenants::set_quota))
            .route("/v1/tenants/drop", post(tenants::remove))
            .route("/v1/tasks", get(tasks::tasks))
            .route("/v1/tasks/copy", post(tasks::copy))
            .route("/v1/tasks/move", post(tasks::relocate))
            .route("/v1/tasks/cancel", post(tasks::cancel))
            .route("/v1/nvme/attach", post(attach))
            .route("/v1/nvme/detach", post(detach))
            .route("/metrics", get(prometheus))
            .layer(middleware::from_fn_with_state(self.clone(), check));
        Router::new()
            .route("/healthz", get(|| async { "ok\n" }))
            .route("/readyz", get(readyz))
            .merge(protected)
            .with_state(self)
    }

    /// Serves until `stop` says true.
    ///
    /// # Errors
    /// The transport's.
    pub async fn serve(self, listener: TcpListener, mut stop: watch::Receiver<bool>) -> Result<(), Error> {
        let stopped = async move {
            let _gone = stop.wait_for(|stop| *stop).await;
        };
        let served = axum::serve(listener, self.router()).with_graceful_shutdown(stopped).await;
        served.map_err(|error| Error::new(ErrorKind::Internal, "INTERNAL", error.to_string()))
    }
}

async fn check(State(api): State<AdminApi>, request: Request, next: Next) -> Result<Response, Error> {
    api.inner.auth.check(request.headers().get(header::AUTHORIZATION).map(|value| value.as_bytes()))?;
    Ok(next.run(request).await)
}

async fn page() -> Html<&'static str> {
    Html(include_str!("page.html"))
}

async fn readyz(State(api): State<AdminApi>) -> (StatusCode, String) {
    let phase = api.inner.service.phase();
    if *api.inner.ready.borrow() {
        (StatusCode::OK, format!("{phase}\n"))
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {phase}\n"))
    }
}

async fn tiers(State(api): State<AdminApi>) -> Json<TiersReport> {
    Json(rows::tiers(api.inner.service.store()))
}

async fn recovery(State(api): State<AdminApi>) -> Json<RecoveryReport> {
    Json(rows::recovery(&api.inner.service))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ObjectQuery {
    key: Option<String>,
    key_base64: Option<String>,
    #[serde(default)]
    tenant: String,
}

async fn object(State(api): State<AdminApi>, Query(query): Query<ObjectQuery>) -> Result<Json<ObjectReport>, Error> {
    let name = named(&api, query.key, query.key_base64, &query.tenant).await?;
    Ok(Json(rows::object(&api.inner.service.object_report(&name).await?)))
}

/// The object that is meant: by text, or by bytes in base64.
async fn named(
    api: &AdminApi,
    key: Option<String>,
    key_base64: Option<String>,
    tenant: &str,
) -> Result<ObjectName, Error> {
    let invalid = |what: String| Error::new(ErrorKind::Invalid, "BAD_KEY", what).field("key");
    let bytes = match (key, key_base64) {
        (Some(key), None) => key.into_bytes(),
        (None, Some(key)) => STANDARD.decode(key).map_err(|error| invalid(format!("key_base64: {error}")))?,
        _ => return Err(invalid("give either key or key_base64".into())),
    };
    let key = ObjectKey::new(&bytes).map_err(|error| invalid(error.to_string()))?;
    Ok(ObjectName { tenant: api.inner.service.tenant(tenant).await?, key })
}

async fn info(State(api): State<AdminApi>) -> Result<Json<InfoReport>, Error> {
    let info = api.inner.service.info().await?;
    Ok(Json(InfoReport {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        node: info.node.to_string(),
        cluster: format!("{:016x}", api.inner.folder.cluster()),
        incarnation: info.incarnation.0,
        role: info.role.to_owned(),
        phase: info.phase.to_owned(),
        applied_index: info.applied.0,
        objects: info.objects,
        grpc: api.inner.grpc.to_string(),
    }))
}

async fn attach(State(api): State<AdminApi>, Json(request): Json<AttachRequest>) -> Result<Json<NvmeReport>, Error> {
    let invalid = |field, what: String| Error::new(ErrorKind::Invalid, "BAD_CONFIG", what).field(field);
    let capacity = request.capacity.map(|capacity| capacity.parse::<Size>()).transpose();
    let capacity = capacity.map_err(|what| invalid("capacity", what))?;
    let records = api.inner.disk.attach(request.path.map(Into::into), capacity.map(|capacity| capacity.0)).await?;
    Ok(Json(NvmeReport { state: "attached".into(), records }))
}

async fn detach(State(api): State<AdminApi>) -> Result<Json<NvmeReport>, Error> {
    api.inner.disk.detach().await?;
    Ok(Json(NvmeReport { state: "detached".into(), records: 0 }))
}

async fn prometheus(State(api): State<AdminApi>) -> Result<(HeaderMap, String), Error> {
    let text = api.inner.metrics.encode().await?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let headers = [(header::CONTENT_TYPE, header::HeaderValue::from_static(kind))];
    Ok((headers.into_iter().collect(), text))
}
