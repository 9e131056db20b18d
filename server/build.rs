//! Generates the server traits; messages come from `tidepool_metadata::proto`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=../proto");
    let descriptors = protox::compile(["tidepool/v1/store.proto"], ["../proto"])?;
    tonic_prost_build::configure()
        .build_client(false)
        .extern_path(".tidepool.v1", "::tidepool_metadata::proto")
        .compile_fds(descriptors)?;
    Ok(())
}
