//! Many that start at the same time: whoever has started can put and get at once, here and elsewhere.

use tidepool_client::PutOptions;
use tidepool_server::Embedded;

use crate::common::TestServer;

const INSTANCES: usize = 8;

/// B058: each binds ports of its own, and keeps them from the start.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn instances_that_start_together_serve_as_soon_as_they_have_started() {
    let node = TestServer::start().await;
    let join = format!("cluster.join=['{}']", node.server.addresses().grpc);
    let settings = [join, "dram.capacity=16MiB".into(), "nvme.enabled=false".into()];
    let mut starting = tokio::task::JoinSet::new();
    for number in 0..INSTANCES {
        let (settings, elsewhere) = (settings.clone(), node.client());
        starting.spawn(async move {
            let instance = Embedded::start(Embedded::config(&settings).unwrap()).await.unwrap();
            let here = instance.client().build().unwrap();
            let (own, other) = (format!("own/{number}"), format!("other/{number}"));
            here.put(&own, vec![1; 100_000].into(), &PutOptions::default()).await.unwrap();
            elsewhere.put(&other, vec![2; 100_000].into(), &PutOptions::default()).await.unwrap();
            for (client, key, byte) in [(&here, &own, 1), (&elsewhere, &own, 1), (&here, &other, 2)] {
                let found = client.get(key).await.unwrap().unwrap_or_else(|| panic!("{key} is not there"));
                assert!(found.value == vec![byte; 100_000], "{key}");
            }
            instance
        });
    }
    for instance in starting.join_all().await {
        instance.shutdown().await.unwrap();
    }
}
