//! A C program uses the library by its header.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Where cargo puts the library: beside this test.
fn library_folder() -> PathBuf {
    let test = std::env::current_exe().expect("this test");
    test.parent().expect("target/profile/deps").to_path_buf()
}

/// Compiles `library.c` and gives the program.
fn program(folder: &Path) -> PathBuf {
    let (crate_folder, library) = (Path::new(env!("CARGO_MANIFEST_DIR")), library_folder());
    let program = folder.join("library");
    let compiled = Command::new("cc")
        .args(["-std=c11", "-D_DEFAULT_SOURCE", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program)
        .arg(crate_folder.join("tests/library.c"))
        .arg("-I")
        .arg(crate_folder.join("include"))
        .arg("-L")
        .arg(&library)
        .arg(format!("-Wl,-rpath,{}", library.display()))
        .arg("-ltidepool")
        .output()
        .expect("a C compiler");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    program
}

#[test]
fn a_c_program_moves_bytes_and_hears_of_its_mistakes() {
    let folder = tempfile::tempdir().expect("folder");
    let mut command = Command::new(program(folder.path()));
    // With a node's address, objects go in and out, too.
    if let Ok(endpoint) = std::env::var("CAPI_ENDPOINT") {
        command.arg(endpoint);
    }
    let ran = command.output().expect("ran");
    assert!(ran.status.success(), "{:?} {}", ran.status, String::from_utf8_lossy(&ran.stderr));
    assert_eq!(ran.stdout, b"ok\n");
}
