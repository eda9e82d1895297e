//! TLS connections with rustls: certificates of the built-in authorities, or of those in a file.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// Certificate authorities to trust: those of a PEM file, else the built-in ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsTrust(pub Option<PathBuf>);

impl TlsTrust {
    /// Returns the settings of connections. Those of one server share them: they hold the TLS sessions that can be resumed.
    ///
    /// # Errors
    /// An authority file that cannot be used.
    pub fn config(&self) -> io::Result<ClientConfig> {
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let builder = builder.with_safe_default_protocol_versions().map_err(io::Error::other)?;
        let mut config = builder.with_root_certificates(self.roots()?).with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }

    fn roots(&self) -> io::Result<RootCertStore> {
        match &self.0 {
            Some(path) => roots_of(path),
            None => Ok(RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() }),
        }
    }
}

/// Makes a connection to `host` secure.
///
/// # Errors
/// A certificate that is not trusted, a broken connection.
pub async fn secure(
    config: Arc<ClientConfig>,
    host: &str,
    stream: TcpStream,
) -> io::Result<TlsStream<TcpStream>> {
    let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
    TlsConnector::from(config).connect(name, stream).await
}

fn roots_of(path: &Path) -> io::Result<RootCertStore> {
    let wrong = |why: &str| io::Error::other(format!("{}: {why}", path.display()));
    let pem = std::fs::read(path).map_err(|error| wrong(&error.to_string()))?;
    let mut roots = RootCertStore::empty();
    let certificates = CertificateDer::pem_slice_iter(&pem).filter_map(Result::ok);
    let (num_added, _) = roots.add_parsable_certificates(certificates);
    match num_added {
        0 => Err(wrong("holds no certificate in PEM form")),
        _ => Ok(roots),
    }
}
