//! `tidepool admin types`.

use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use tidepool_metadata::DataType;

use super::connection::ConnectionArguments;
use super::failure::Failure;
use super::objects::data_type_named;
use super::output::{Output, Table, size};
use crate::admin::report::{TypeRequest, TypesReport};

/// What to do with a type.
#[derive(Debug, Subcommand)]
pub(super) enum TypeCommand {
    /// Say what becomes of its objects from now on, all of it at once: what is left out is as for any type
    Set(TypeArguments),
}

/// What becomes of objects whose puts do not say.
#[derive(Args, Debug)]
pub(super) struct TypeArguments {
    /// Which type, as `admin types` shows it
    #[arg(value_parser = data_type_named)]
    data_type: DataType,
    /// How many copies there are to be, 1 to 15; 0: as `replicas.count` of the node says that takes the put
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    copies: u8,
    /// Where they lie
    #[arg(long, value_enum, default_value_t = Tier::Any)]
    tier: Tier,
    /// They are pinned from the start
    #[arg(long)]
    pin: bool,
    /// Most bytes of all tenants, times copies, such as 10GiB
    #[arg(long, value_name = "SIZE")]
    quota: Option<String>,
}

/// Where objects of a type lie.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Tier {
    /// In memory, and on disk when they leave it
    Any,
    /// In memory only: they are forgotten when they leave it
    Memory,
    /// On disk from the start
    Nvme,
}

pub(super) async fn run(
    change: Option<&TypeCommand>,
    connection: &ConnectionArguments,
    output: &Output,
) -> Result<ExitCode, Failure> {
    let admin = connection.admin()?;
    let report: TypesReport = match change {
        None => admin.get("/v1/types").await?,
        Some(TypeCommand::Set(TypeArguments { data_type, copies, tier, pin, quota })) => {
            let tier = match tier {
                Tier::Any => "any",
                Tier::Memory => "memory",
                Tier::Nvme => "nvme",
            };
            let (data_type, tier) = (data_type.name().to_owned(), tier.to_owned());
            let request = TypeRequest { data_type, copies: *copies, tier, pin: *pin, quota: quota.clone() };
            admin.post("/v1/types/set", &request).await?
        }
    };
    output.answer(&report, |report| {
        let mut table = Table::new(&["type", "copies", "tier", "pinned", "size", "of"]);
        for row in &report.types {
            table.row([
                row.data_type.clone(),
                if row.copies == 0 { "-".into() } else { row.copies.to_string() },
                row.tier.clone(),
                if row.pin { "yes".into() } else { String::new() },
                size(row.bytes),
                row.quota_bytes.map_or_else(|| "-".to_owned(), size),
            ]);
        }
        table.render()
    })
}
