//! Everything but bytes: existence, removal, pins, leases, listings.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures::stream;
use tidepool_metadata::ObjectKey;
use tidepool_metadata::proto;
use tonic::Status;

use super::{MAX_UNARY_BYTES, Replies, StoreApi, convert};
use crate::error::Error;
use crate::node::{KeyFilter, RemoveOutcome};

/// Objects of a page if the caller does not say.
const DEFAULT_PAGE: usize = 1000;
/// Most objects of a page.
const LARGEST_PAGE: usize = 10_000;
/// A compiled expression may take this much memory; what needs more is refused.
const PATTERN_BYTES: usize = 1 << 20;

/// Lease asked for in milliseconds; 0 is the default.
fn lease(duration_ms: u32) -> Duration {
    if duration_ms == 0 { crate::node::DEFAULT_LEASE } else { Duration::from_millis(duration_ms.into()) }
}

fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

impl StoreApi {
    pub(crate) async fn exists_keys(&self, request: proto::ExistsRequest) -> Result<proto::ExistsReply, Error> {
        let keys = &request.keys;
        convert::check_keys(keys)?;
        let tenant = self.tenant(&request.tenant).await?;
        let freshness = convert::freshness(request.fresh, request.seen_index);
        let outcome = |presence| convert::existence(presence).into();
        let outcomes = if request.lease_ms > 0 {
            let (keys, lease) = (convert::keys(keys)?, lease(request.lease_ms));
            let presence = self.service.exists_with_lease(tenant, keys, lease).await?;
            presence.into_iter().map(Some).map(outcome).collect()
        } else if request.allow_unconfirmed {
            let presence = self.service.exists_or_unconfirmed(tenant, keys, freshness).await?;
            presence.into_iter().map(outcome).collect()
        } else {
            let presence = self.service.exists(tenant, keys, freshness).await?;
            presence.into_iter().map(Some).map(outcome).collect()
        };
        Ok(proto::ExistsReply { outcomes })
    }

    pub(crate) async fn begin_session(
        &self,
        request: proto::OpenSessionRequest,
    ) -> Result<proto::OpenSessionReply, Error> {
        let lifetime = self.service.open_session(convert::session(request.session)?).await?;
        Ok(proto::OpenSessionReply { lifetime_ms: millis(lifetime) })
    }

    pub(crate) async fn remove_keys(&self, request: proto::RemoveRequest) -> Result<proto::RemoveReply, Error> {
        let keys = convert::keys(&request.keys)?;
        let tenant = self.tenant(&request.tenant).await?;
        let ids = convert::request_ids(request.ids, keys.len())?;
        let (log_index, outcomes) = self.service.remove(tenant, keys, request.force, ids).await?;
        let outcomes = outcomes.into_iter().map(|outcome| match outcome {
            RemoveOutcome::Missing => proto::RemoveOutcome::Missing.into(),
            RemoveOutcome::Removed => proto::RemoveOutcome::Removed.into(),
            RemoveOutcome::Pinned => proto::RemoveOutcome::Pinned.into(),
        });
        Ok(proto::RemoveReply { outcomes: outcomes.collect(), log_index: log_index.0 })
    }

    pub(super) async fn remove_filtered(
        &self,
        request: proto::RemoveMatchingRequest,
    ) -> Result<Replies<proto::RemoveMatchingReply>, Error> {
        use proto::remove_matching_request::Filter;
        let tenant = self.tenant(&request.tenant).await?;
        let filter = match request.filter {
            Some(Filter::Prefix(prefix)) => KeyFilter::Prefix(prefix.to_vec()),
            Some(Filter::Pattern(pattern)) => KeyFilter::Pattern(compile(&pattern)?),
            Some(Filter::All(true)) => KeyFilter::All,
            Some(Filter::All(false)) | None => {
                return Err(convert::invalid("BAD_FILTER", "filter", "give a prefix, a pattern, or all = true".into()));
            }
        };
        let start = Some((self.service.clone(), filter, None::<ObjectKey>, proto::RemoveMatchingReply::default()));
        let force = request.force;
        let replies = stream::try_unfold(start, move |state| async move {
            let Some((service, filter, after, mut total)) = state else { return Ok::<_, Status>(None) };
            let page = service.remove_matching(tenant, &filter, force, after).await?;
            total.examined += page.examined;
            total.removed += page.removed;
            total.pinned += page.pinned;
            total.log_index = total.log_index.max(page.log_index.0);
            total.done = page.next.is_none();
            let rest = page.next.map(|next| (service, filter, Some(next), total));
            Ok(Some((total, rest)))
        });
        Ok(Box::pin(replies))
    }

    pub(crate) async fn change_pins(&self, request: proto::PinRequest, pinned: bool) -> Result<proto::PinReply, Error> {
        let keys = convert::keys(&request.keys)?;
        let tenant = self.tenant(&request.tenant).await?;
        let ids = convert::request_ids(request.ids, keys.len())?;
        let (log_index, found) = self.service.pin(tenant, keys, pinned, ids).await?;
        Ok(proto::PinReply { found, log_index: log_index.0 })
    }

    pub(crate) async fn renew(&self, request: proto::LeaseRequest) -> Result<proto::LeaseReply, Error> {
        let keys = convert::keys(&request.keys)?;
        let tenant = self.tenant(&request.tenant).await?;
        let granted = self.service.renew_leases(tenant, keys, lease(request.duration_ms)).await?;
        Ok(proto::LeaseReply { granted_ms: granted.into_iter().map(millis).collect() })
    }

    pub(crate) async fn release(&self, request: proto::LeaseRequest) -> Result<proto::LeaseReply, Error> {
        let keys = convert::keys(&request.keys)?;
        let tenant = self.tenant(&request.tenant).await?;
        let released = self.service.release_leases(tenant, keys).await?;
        Ok(proto::LeaseReply { granted_ms: released.into_iter().map(|_| 0).collect() })
    }

    pub(super) async fn note_reads(
        &self,
        request: proto::NoteLocalReadsRequest,
    ) -> Result<proto::NoteLocalReadsReply, Error> {
        let keys = convert::keys(&request.keys)?;
        let tenant = self.tenant(&request.tenant).await?;
        self.service.note_local_reads(tenant, &keys);
        Ok(proto::NoteLocalReadsReply {})
    }

    pub(crate) async fn list_page(&self, request: proto::ListRequest) -> Result<proto::ListReply, Error> {
        let tenant = self.tenant(&request.tenant).await?;
        let after = read_token(&request.page_token)?;
        let limit = match request.page_size as usize {
            0 => DEFAULT_PAGE,
            size if size <= LARGEST_PAGE => size,
            size => {
                let message = format!("page of {size} objects: ask for at most {LARGEST_PAGE}");
                return Err(convert::invalid("BAD_PAGE_SIZE", "page_size", message));
            }
        };
        let data_type = match request.data_type {
            0 => None,
            number => Some(convert::data_type(number)?),
        };
        let page = self.service.list(tenant, &request.prefix, after.as_ref(), limit, data_type).await?;
        let objects = page.objects.into_iter().map(|object| proto::ListedObject {
            key: object.key.as_bytes().to_vec().into(),
            length: object.length,
            data_type: object.data_type as i32,
            group: object.group.as_deref().unwrap_or_default().to_owned(),
            pins: object.pins,
            replicas: object.replicas,
        });
        let next_page_token = page.next.as_ref().map(write_token).unwrap_or_default();
        Ok(proto::ListReply { objects: objects.collect(), next_page_token })
    }

    pub(crate) async fn stat_object(&self, request: proto::StatRequest) -> Result<proto::StatReply, Error> {
        let name = self.name(&request.tenant, &request.key).await?;
        let stat = self.service.stat(&name).await?;
        let replicas = stat.replicas.iter().map(|copy| proto::Replica {
            node: copy.replica.node.to_string(),
            replica: format!("{}.{}", copy.replica.incarnation.0, copy.replica.sequence),
            node_state: copy.node_state.to_owned(),
        });
        Ok(proto::StatReply {
            length: stat.listed.length,
            data_type: stat.listed.data_type as i32,
            group: stat.listed.group.as_deref().unwrap_or_default().to_owned(),
            pins: stat.listed.pins,
            version: stat.version.to_string(),
            replicas: replicas.collect(),
            slice_checksums: stat.slice_checksums,
            log_index: stat.log_index.0,
            lease_ms: stat.lease_ms,
        })
    }

    pub(super) async fn info(&self, request: proto::ServerInfoRequest) -> Result<proto::ServerInfoReply, Error> {
        let info = self.service.info().await?;
        let tenant = self.tenant(&request.tenant).await?;
        let folder = self.host.folder.as_ref().and_then(|folder| folder.to_str());
        Ok(proto::ServerInfoReply {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            node: info.node.to_string(),
            cluster: format!("{:016x}", self.host.cluster),
            incarnation: info.incarnation.0,
            role: info.role.to_owned(),
            applied_index: info.applied.0,
            max_object_bytes: self.service.max_object_bytes(),
            max_unary_bytes: MAX_UNARY_BYTES,
            phase: info.phase.to_owned(),
            objects: info.objects,
            engine: self.host.engine.map(|address| address.to_string()).unwrap_or_default(),
            boot_id: crate::plan::boot_id(),
            folder: folder.unwrap_or_default().to_owned(),
            tenant_number: tenant.0,
            takers: self.service.takers().await,
        })
    }
}

fn compile(pattern: &str) -> Result<regex::bytes::Regex, Error> {
    let built = regex::bytes::RegexBuilder::new(pattern).size_limit(PATTERN_BYTES).build();
    built.map_err(|error| convert::invalid("BAD_PATTERN", "pattern", error.to_string()))
}

/// A page token is the last key of the page before, with a mark and a checksum, so that a foreign or cut one is refused.
fn write_token(last: &ObjectKey) -> String {
    let mut bytes = vec![1];
    bytes.extend_from_slice(&crc32fast::hash(last.as_bytes()).to_le_bytes());
    bytes.extend_from_slice(last.as_bytes());
    URL_SAFE_NO_PAD.encode(bytes)
}

fn read_token(token: &str) -> Result<Option<ObjectKey>, Error> {
    if token.is_empty() {
        return Ok(None);
    }
    let read = || {
        let bytes = URL_SAFE_NO_PAD.decode(token).ok()?;
        let rest = bytes.strip_prefix(&[1])?;
        let (checksum, key) = rest.split_first_chunk::<4>()?;
        (crc32fast::hash(key) == u32::from_le_bytes(*checksum)).then(|| ObjectKey::new(key).ok())?
    };
    let message =
        "not a page token of this server: give `next_page_token` of the last reply, or none for the first page";
    read().map(Some).ok_or_else(|| convert::invalid("BAD_PAGE_TOKEN", "page_token", message.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_tokens_come_back_and_others_are_refused() {
        let key = ObjectKey::new(&[0, 255, 7]).expect("legal key");
        let token = write_token(&key);
        assert_eq!(read_token(&token).expect("own token"), Some(key));
        assert_eq!(read_token("").expect("first page"), None);
        for bad in ["x", "AQ", "AAAAAAAA", &token[1..], &format!("{token}AA")] {
            assert_eq!(read_token(bad).expect_err(bad).reason(), "BAD_PAGE_TOKEN");
        }
    }
}
