use super::*;

fn set(settings: &[&str]) -> Result<Config, ConfigError> {
    let settings: Vec<String> = settings.iter().map(ToString::to_string).collect();
    load(None, [], &settings)
}

#[test]
fn flags_win_over_environment_over_file() {
    let temp = tempfile::tempdir().expect("temporary folder");
    let path = temp.path().join("tidepool.toml");
    std::fs::write(&path, "[dram]\ncapacity = '1GiB'\nwatermark_low = 0.5\n[limits]\nstreams = 7\n").expect("writable");
    let environment = [("TIDEPOOL_DRAM__CAPACITY".to_owned(), "2GiB".to_owned())];
    let config = load(Some(&path), environment.clone(), &[]).expect("good settings");
    assert_eq!((config.dram.capacity, config.limits.streams), (Some(Size(2 << 30)), 7));
    let config = load(Some(&path), environment, &["dram.capacity=3GiB".into()]).expect("good settings");
    assert_eq!(config.dram.capacity, Some(Size(3 << 30)));
    assert!((config.dram.watermark_low - 0.5).abs() < f64::EPSILON);
}

#[test]
fn a_wrong_value_is_refused_with_name_value_and_bounds() {
    for (setting, parts) in [
        ("dram.watermark_low=0.97", ["dram.watermark_low", "0.97", "0.95"]),
        ("nvme.queue_depth=0", ["nvme.queue_depth", "0", "1 to 1024"]),
        ("limits.max_object_bytes=17GiB", ["limits.max_object_bytes", "17GiB", "16GiB"]),
        ("store.slice_bytes=100KiB", ["store.slice_bytes", "100KiB", "64KiB"]),
        ("labels.rack='a\tb'", ["labels.rack", "a\tb", "64 printable"]),
        ("replicas.count=16", ["replicas.count", "16", "1 to 15"]),
        ("shutdown_timeout=0s", ["shutdown_timeout", "0", "1s to 10m"]),
    ] {
        let message = set(&[setting]).expect_err(setting).to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{setting}: {message}");
    }
}

#[test]
fn unknown_fields_are_errors() {
    let message = set(&["dram.capasity=1GiB"]).expect_err("unknown").to_string();
    assert!(message.contains("capasity") && message.contains("capacity"), "{message}");
    assert!(set(&["drum.capacity=1GiB"]).is_err());
    let variable = [("TIDEPOOL_DRAM__CAPASITY".to_owned(), "1".to_owned())];
    assert!(load(None, variable, &[]).is_err());
}

#[test]
fn an_address_that_others_reach_needs_a_secret() {
    let message = set(&["grpc.listen='0.0.0.0:7420'"]).expect_err("exposed").to_string();
    assert!(message.contains("grpc.listen") && message.contains("secret_file"), "{message}");
    assert!(set(&["grpc.listen='0.0.0.0:7420'", "cluster.insecure=true"]).is_ok());
    assert!(set(&["admin.listen='[::1]:7422'"]).is_ok());
}

#[test]
fn certificate_key_and_authorities_belong_together() {
    let all = ["engine.tls_certificate='/c'", "engine.tls_key='/k'", "engine.tls_authorities='/a'"];
    assert!(set(&all).is_ok());
    for missing in 0..3 {
        let some: Vec<_> = (0..3).filter(|&place| place != missing).map(|place| all[place]).collect();
        let message = set(&some).expect_err("one is missing").to_string();
        assert!(message.contains("engine.tls_key") && message.contains("all three"), "{message}");
    }
    assert!(set(&["engine.tls_name='node.test'"]).is_err());
}

#[test]
fn what_is_printed_can_be_loaded() {
    let config = set(&["dram.capacity=1GiB", "nvme.engine=blocking"]).expect("good settings");
    let temp = tempfile::tempdir().expect("temporary folder");
    let path = temp.path().join("tidepool.toml");
    std::fs::write(&path, toml::to_string(&config).expect("plain data")).expect("writable");
    assert_eq!(load(Some(&path), [], &[]).expect("own output"), config);
}

/// Every field stands in the documentation, and nothing else does.
#[test]
fn the_documentation_lists_every_field() {
    let page = include_str!("../../../docs/src/configuration.md");
    let documented: std::collections::BTreeSet<&str> =
        page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`').map(|(name, _)| name)).collect();
    let source = include_str!("mod.rs");
    let mut fields = std::collections::BTreeSet::new();
    for line in source.lines().filter_map(|line| line.strip_prefix("    pub ")) {
        if let Some((name, _)) = line.split_once(':') {
            fields.insert(name);
        }
    }
    let sections = [
        "grpc",
        "admin",
        "cluster",
        "catalog",
        "store",
        "replicas",
        "labels",
        "dram",
        "nvme",
        "device",
        "limits",
        "telemetry",
    ];
    sections.iter().for_each(|section| assert!(fields.remove(section)));
    let last = |name: &'static str| name.rsplit('.').next().unwrap_or(name);
    assert_eq!(documented.iter().map(|name| last(name)).collect::<std::collections::BTreeSet<_>>(), fields);
}
