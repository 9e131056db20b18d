//! As much of HTTP as asking our own admin port needs: one request a connection, HTTP/1.0, so that the answer ends with
//! the connection and never comes in chunks.

use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::failure::Failure;

/// Longest answer that is read.
const ANSWER_BYTES: u64 = 64 << 20;

/// Asks one node's admin HTTP.
#[derive(Debug)]
pub(super) struct AdminClient {
    address: String,
    token: Option<String>,
    deadline: Duration,
}

impl AdminClient {
    pub(super) fn new(address: String, token: Option<String>, deadline: Duration) -> Self {
        let address = address.strip_prefix("http://").map_or(address.as_str(), |rest| rest).trim_end_matches('/');
        Self { address: address.to_owned(), token, deadline }
    }

    /// `GET path`, decoded.
    pub(super) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        self.ask("GET", path, None).await
    }

    /// `POST path` with a JSON body, decoded.
    pub(super) async fn post<B: Serialize, T: DeserializeOwned>(&self, path: &str, body: &B) -> Result<T, Failure> {
        let body = serde_json::to_vec(body).map_err(|error| self.failure(format!("encode the request: {error}")))?;
        self.ask("POST", path, Some(body)).await
    }

    async fn ask<T: DeserializeOwned>(&self, method: &str, path: &str, body: Option<Vec<u8>>) -> Result<T, Failure> {
        let exchange = self.exchange(method, path, body.as_deref());
        let answer = tokio::time::timeout(self.deadline, exchange)
            .await
            .map_err(|_| self.failure(format!("no answer after {:?}", self.deadline)))?
            .map_err(|error| self.failure(format!("{error}; is a node running? (tidepool serve)")))?;
        let (status, body) = parse(&answer).ok_or_else(|| self.failure("the answer is not HTTP".into()))?;
        if status != 200 {
            return Err(self.refusal(status, body));
        }
        serde_json::from_slice(body).map_err(|error| self.failure(format!("the answer can't be understood: {error}")))
    }

    async fn exchange(&self, method: &str, path: &str, body: Option<&[u8]>) -> std::io::Result<Vec<u8>> {
        let mut stream = TcpStream::connect(&self.address).await?;
        let mut head = format!("{method} {path} HTTP/1.0\r\nHost: {}\r\nAccept: application/json\r\n", self.address);
        if let Some(token) = &self.token {
            head += &format!("Authorization: Bearer {token}\r\n");
        }
        if let Some(body) = body {
            head += &format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len());
        }
        head += "\r\n";
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(body.unwrap_or_default()).await?;
        let mut answer = Vec::new();
        stream.take(ANSWER_BYTES).read_to_end(&mut answer).await?;
        Ok(answer)
    }

    fn failure(&self, what: String) -> Failure {
        Failure::local("ADMIN_UNREACHABLE", format!("ask admin HTTP at {}: {what}", self.address))
    }

    /// What the server said, in its own words if it is ours.
    fn refusal(&self, status: u16, body: &[u8]) -> Failure {
        #[derive(serde::Deserialize)]
        struct Refusal {
            error: String,
            reason: String,
        }
        match serde_json::from_slice::<Refusal>(body) {
            Ok(Refusal { error, reason }) if matches!(&*reason, "NOT_FOUND" | "NO_SUCH_TASK") => {
                Failure::no(&reason, error)
            }
            Ok(Refusal { error, reason }) => Failure::local(&reason, error),
            Err(_) => self.failure(format!("status {status}: {}", String::from_utf8_lossy(body).trim())),
        }
    }
}

/// Status and body.
fn parse(answer: &[u8]) -> Option<(u16, &[u8])> {
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n")?;
    let status = std::str::from_utf8(&answer[..end]).ok()?.split(' ').nth(1)?;
    Some((status.parse().ok()?, &answer[end + 4..]))
}

/// `bytes` as they can stand in a query.
pub(super) fn query_value(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            text.push(byte as char);
        } else {
            // Writing to a string can't fail.
            let _written = write!(text, "%{byte:02X}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_taken_apart() {
        let answer = b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n{}";
        assert_eq!(parse(answer), Some((200, &b"{}"[..])));
        for text in [&b""[..], b"SSH-2.0", b"HTTP/1.0\r\n\r\n", b"HTTP/1.0 abc OK\r\n\r\n"] {
            assert_eq!(parse(text), None);
        }
    }

    #[test]
    fn queries_are_escaped() {
        assert_eq!(query_value(b"a/b +=\xff~"), "a%2Fb%20%2B%3D%FF~");
    }

    #[tokio::test]
    async fn a_refusal_is_told_in_the_servers_words() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let client = AdminClient::new(
            format!("http://{}/", listener.local_addr().expect("is bound")),
            Some("secret".into()),
            Duration::from_secs(5),
        );
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("one caller");
            let mut request = vec![0; 4096];
            let length = stream.read(&mut request).await.expect("a request");
            let answer =
                b"HTTP/1.0 404 Not Found\r\n\r\n{\"error\":\"no object\",\"reason\":\"NOT_FOUND\",\"field\":\"\"}";
            stream.write_all(answer).await.expect("the caller listens");
            String::from_utf8_lossy(&request[..length]).into_owned()
        });
        let refused = client.get::<serde_json::Value>("/v1/objects?key=x").await.expect_err("404 is a refusal");
        assert_eq!(refused.message(), "no object");
        let request = server.await.expect("the server ended well");
        assert!(request.starts_with("GET /v1/objects?key=x HTTP/1.0\r\n"), "{request}");
        assert!(request.contains("Authorization: Bearer secret\r\n"), "{request}");
    }
}
