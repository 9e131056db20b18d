//! Tenants, as an operator sees and changes them.

use axum::Json;
use axum::extract::State;
use tidepool_metadata::ErrorKind;
use tidepool_metadata::catalog::{
    Answer, Command, MAX_NAME_BYTES, MAX_TENANTS, Outcome, Query, Quota, TenantOutcome, TenantStat,
};
use tidepool_replication::{CatalogError, Read};

use super::AdminApi;
use super::report::{TenantRequest, TenantRow, TenantsReport};
use crate::config::Size;
use crate::error::Error;

pub(super) async fn tenants(State(api): State<AdminApi>) -> Result<Json<TenantsReport>, Error> {
    let (_, answer) = api.inner.service.catalog().await?.query(Query::Tenants, Read::Linearizable).await?;
    let Answer::Tenants(tenants) = answer else { return Err(CatalogError::Unexpected { expected: "tenants" }.into()) };
    let row = |tenant: TenantStat| TenantRow {
        name: if tenant.name.is_empty() { "default".to_owned() } else { tenant.name },
        number: tenant.tenant.0,
        state: if tenant.dropping { "dropping" } else { "serving" }.to_owned(),
        objects: tenant.objects,
        bytes: tenant.bytes,
        quota_objects: tenant.quota.objects,
        quota_bytes: tenant.quota.bytes,
    };
    Ok(Json(TenantsReport { tenants: tenants.into_iter().map(row).collect() }))
}

pub(super) async fn create(
    State(api): State<AdminApi>,
    Json(request): Json<TenantRequest>,
) -> Result<Json<TenantsReport>, Error> {
    let refused = |message: String| Err(Error::new(ErrorKind::Invalid, "BAD_TENANT", message).field("name"));
    if request.name == "default" {
        return Err(is_reserved());
    }
    if !(1..=MAX_NAME_BYTES).contains(&request.name.len()) {
        return refused(format!("a name has 1 to {MAX_NAME_BYTES} bytes, and not {}", request.name.len()));
    }
    let command = Command::CreateTenant { name: request.name.clone(), quota: quota(&request)? };
    match change(&api, command).await? {
        TenantOutcome::Created { .. } => tenants(State(api)).await,
        TenantOutcome::Exists { .. } => {
            let message =
                format!("there is a tenant {:?}: `admin tenants quota` changes what it may store", request.name);
            Err(Error::new(ErrorKind::Conflict, "TENANT_EXISTS", message).field("name"))
        }
        _ => refused(format!(
            "there are {MAX_TENANTS} tenants at most, and the name of one that is being dropped is waited for"
        )),
    }
}

pub(super) async fn set_quota(
    State(api): State<AdminApi>,
    Json(request): Json<TenantRequest>,
) -> Result<Json<TenantsReport>, Error> {
    let tenant = api.inner.service.tenant(&request.name).await?;
    match change(&api, Command::SetQuota { tenant, quota: quota(&request)? }).await? {
        TenantOutcome::Changed => tenants(State(api)).await,
        _ => Err(crate::node::unknown_tenant(&request.name)),
    }
}

/// Hides the tenant at once, and removes its objects step by step; what is left when the caller goes away is removed by the
/// next call.
pub(super) async fn remove(
    State(api): State<AdminApi>,
    Json(request): Json<TenantRequest>,
) -> Result<Json<TenantsReport>, Error> {
    let (_, answer) = api.inner.service.catalog().await?.query(Query::Tenants, Read::Linearizable).await?;
    let Answer::Tenants(known) = answer else { return Err(CatalogError::Unexpected { expected: "tenants" }.into()) };
    if matches!(&*request.name, "" | "default") {
        return Err(is_reserved());
    }
    let found = known.iter().find(|known| known.name == request.name);
    let tenant = found.ok_or_else(|| crate::node::unknown_tenant(&request.name))?.tenant;
    while let TenantOutcome::Dropping { .. } = change(&api, Command::DropTenant { tenant }).await? {}
    tenants(State(api)).await
}

async fn change(api: &AdminApi, command: Command) -> Result<TenantOutcome, Error> {
    match api.inner.service.catalog().await?.propose(command).await? {
        (_, Outcome::Tenant(outcome)) => Ok(outcome),
        _ => Err(CatalogError::Unexpected { expected: "a tenant" }.into()),
    }
}

fn quota(request: &TenantRequest) -> Result<Quota, Error> {
    let bytes = request.bytes.as_deref().map(str::parse::<Size>).transpose();
    let bytes = bytes.map_err(|what| Error::new(ErrorKind::Invalid, "BAD_SIZE", what).field("bytes"))?;
    Ok(Quota { bytes: bytes.map(|Size(bytes)| bytes), objects: request.objects })
}

fn is_reserved() -> Error {
    let message = "the default tenant is always there, and can't be created or dropped";
    Error::new(ErrorKind::Invalid, "BAD_TENANT", message.into()).field("name")
}
