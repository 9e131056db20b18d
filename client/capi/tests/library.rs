//! A C program uses the library by its header.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

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

/// A node with ports of its own, which ends with the test.
struct Node {
    process: Child,
    endpoint: String,
}

impl Node {
    fn start(folder: &Path) -> Self {
        let places = library_folder();
        let program = places.ancestors().map(|folder| folder.join("tidepool")).find(|program| program.is_file());
        let mut process = Command::new(program.expect("the tidepool binary is built"))
            .args(["serve", "--json", "--dram=64MiB", "--nvme=0", "--set", "grpc.listen='127.0.0.1:0'"])
            .args(["--set", "admin.listen='127.0.0.1:0'", "--set", "dram.survive_restart=false", "--data"])
            .arg(folder.join("data"))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("a node");
        let mut line = String::new();
        let read = BufReader::new(process.stdout.take().expect("piped")).read_line(&mut line);
        let addresses: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
        let endpoint = addresses["grpc"].as_str().unwrap_or_else(|| panic!("it said {read:?} {line:?}")).to_owned();
        Self { process, endpoint }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ended = (self.process.kill(), self.process.wait());
    }
}

#[test]
fn a_c_program_moves_bytes_and_hears_of_its_mistakes() {
    let folder = tempfile::tempdir().expect("folder");
    let node = Node::start(folder.path());
    let ran = Command::new(program(folder.path())).arg(&node.endpoint).output().expect("ran");
    assert!(ran.status.success(), "{:?} {}", ran.status, String::from_utf8_lossy(&ran.stderr));
    assert_eq!(ran.stdout, b"ok\n");
}
