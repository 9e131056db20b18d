//! Generates the messages of `tidepool.v1` without services, so that this crate needs no tonic and no protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=../proto");
    let descriptors = protox::compile(["tidepool/v1/store.proto", "tidepool/v1/data.proto"], ["../proto"])?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    prost_build::Config::new()
        .bytes(["."])
        .boxed(".tidepool.v1.ObjectDescription.held")
        .file_descriptor_set_path(out.join("tidepool.v1.bin"))
        .compile_fds(descriptors.clone())?;
    std::fs::write(out.join("tidepool.v1.bin"), prost::Message::encode_to_vec(&descriptors))?;
    Ok(())
}
