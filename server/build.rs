//! Generates the server traits of the client protocol, whose messages come from `tidepool_metadata::proto`, and all of the
//! protocol between nodes.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=../proto");
    let store = protox::compile(["tidepool/v1/store.proto"], ["../proto"])?;
    tonic_prost_build::configure()
        .build_client(false)
        .extern_path(".tidepool.v1", "::tidepool_metadata::proto")
        .compile_fds(store)?;
    let peer = protox::compile(["tidepool/peer/v1/peer.proto"], ["../proto"])?;
    tonic_prost_build::configure().bytes(".").compile_fds(peer)?;
    Ok(())
}
