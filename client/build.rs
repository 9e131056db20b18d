//! Generates the client stubs, and for tests the server trait; messages come from `tidepool_metadata::proto`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=../proto");
    let descriptors = protox::compile(["tidepool/v1/store.proto"], ["../proto"])?;
    tonic_prost_build::configure()
        .server_mod_attribute(".", "#[cfg(test)]")
        .extern_path(".tidepool.v1", "::tidepool_metadata::proto")
        .compile_fds(descriptors)?;
    Ok(())
}
