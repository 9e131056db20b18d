//! What becomes of objects by their type, as an operator sees and changes it.

use axum::Json;
use axum::extract::State;
use tidepool_metadata::catalog::{Command, MAX_COPIES, Outcome, Setting, TypePolicy, TypeTier};
use tidepool_metadata::{DataType, ErrorKind};
use tidepool_replication::CatalogError;

use super::AdminApi;
use super::report::{TypeRequest, TypeRow, TypesReport};
use crate::config::Size;
use crate::error::Error;

const TIERS: [(TypeTier, &str); 3] = [(TypeTier::Any, "any"), (TypeTier::Memory, "memory"), (TypeTier::Nvme, "nvme")];

pub(super) async fn types(State(api): State<AdminApi>) -> Result<Json<TypesReport>, Error> {
    let catalog = api.inner.service.catalog().await?;
    let row = |data_type: DataType| {
        let (policy, bytes) = catalog.type_use(data_type);
        let tier = TIERS.iter().find(|(tier, _)| *tier == policy.tier).map_or("any", |(_, name)| name);
        TypeRow {
            data_type: data_type.name().to_owned(),
            copies: policy.copies,
            tier: tier.to_owned(),
            pin: policy.pin,
            quota_bytes: policy.quota_bytes,
            bytes,
        }
    };
    Ok(Json(TypesReport { types: DataType::all().map(row).collect() }))
}

pub(super) async fn set(
    State(api): State<AdminApi>,
    Json(request): Json<TypeRequest>,
) -> Result<Json<TypesReport>, Error> {
    let invalid = |field, message: String| Error::new(ErrorKind::Invalid, "BAD_TYPE", message).field(field);
    let data_type = DataType::all().find(|data_type| data_type.name() == request.data_type).ok_or_else(|| {
        let names: Vec<&str> = DataType::all().map(DataType::name).collect();
        invalid("data_type", format!("{:?} is none of {}", request.data_type, names.join(", ")))
    })?;
    let tier = TIERS.iter().find(|(_, name)| *name == request.tier).map(|(tier, _)| *tier);
    let tier = tier.ok_or_else(|| invalid("tier", format!("{:?} is none of any, memory, nvme", request.tier)))?;
    if request.copies > MAX_COPIES {
        return Err(invalid("copies", format!("{} copies: 1 to {MAX_COPIES}, or 0 as the node says", request.copies)));
    }
    let quota = request.quota.as_deref().map(str::parse::<Size>).transpose();
    let quota_bytes = quota.map_err(|what| invalid("quota", what))?.map(|Size(bytes)| bytes);
    let policy = TypePolicy { copies: request.copies, tier, pin: request.pin, quota_bytes };
    let setting = Setting::Type { data_type, policy };
    match api.inner.service.led_catalog().await?.propose(Command::SetSetting(setting)).await? {
        (_, Outcome::Setting(set)) if set == setting => types(State(api)).await,
        _ => Err(CatalogError::Unexpected { expected: "a setting" }.into()),
    }
}
