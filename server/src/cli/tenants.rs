//! `tidepool admin tenants`.

use std::process::ExitCode;

use clap::{Args, Subcommand};

use super::connection::ConnectionArguments;
use super::failure::Failure;
use super::output::{Output, Table, size};
use crate::admin::report::{TenantRequest, TenantsReport};

/// What to do with a tenant.
#[derive(Debug, Subcommand)]
pub(super) enum TenantCommand {
    /// Create one. Clients name it with --tenant
    Create {
        /// Its name
        name: String,
        #[command(flatten)]
        quota: QuotaArguments,
    },
    /// Change what it may store, both bounds at once: what is left out is unbounded. Nothing is removed: a tenant above its
    /// bound stores nothing new until it is below
    Quota {
        /// Its name; `default` for callers who name none
        name: String,
        #[command(flatten)]
        quota: QuotaArguments,
    },
    /// Drop it with all its objects
    Drop {
        /// Its name
        name: String,
    },
}

/// What a tenant may store.
#[derive(Args, Debug)]
pub(super) struct QuotaArguments {
    /// Most bytes, times copies, such as 10GiB
    #[arg(long)]
    bytes: Option<String>,
    /// Most objects
    #[arg(long)]
    objects: Option<u64>,
}

pub(super) async fn run(
    change: Option<&TenantCommand>,
    connection: &ConnectionArguments,
    output: &Output,
) -> Result<ExitCode, Failure> {
    let admin = connection.admin()?;
    let request = |name: &String, quota: Option<&QuotaArguments>| TenantRequest {
        name: name.clone(),
        bytes: quota.and_then(|quota| quota.bytes.clone()),
        objects: quota.and_then(|quota| quota.objects),
    };
    let report: TenantsReport = match change {
        None => admin.get("/v1/tenants").await?,
        Some(TenantCommand::Create { name, quota }) => {
            admin.post("/v1/tenants/create", &request(name, Some(quota))).await?
        }
        Some(TenantCommand::Quota { name, quota }) => {
            admin.post("/v1/tenants/quota", &request(name, Some(quota))).await?
        }
        Some(TenantCommand::Drop { name }) => admin.post("/v1/tenants/drop", &request(name, None)).await?,
    };
    output.answer(&report, |report| {
        let mut table = Table::new(&["tenant", "state", "objects", "of", "size", "of"]);
        for tenant in &report.tenants {
            let bound = |bound: Option<String>| bound.unwrap_or_else(|| "-".to_owned());
            table.row([
                tenant.name.clone(),
                tenant.state.clone(),
                tenant.objects.to_string(),
                bound(tenant.quota_objects.map(|objects| objects.to_string())),
                size(tenant.bytes),
                bound(tenant.quota_bytes.map(size)),
            ]);
        }
        table.render()
    })
}
