# Installs llmctl's newest release for Windows: irm URL | iex
#
#   $env:LLMCTL_VERSION       a version such as 0.1.0; the newest by default
#   $env:LLMCTL_INSTALL_DIR   folder of the program; %LOCALAPPDATA%\llmctl by default
#
# The archive is compared with the release's SHA256SUMS before anything is unpacked.
$ErrorActionPreference = 'Stop'
$ProgressPreference = 'SilentlyContinue'

function Install-Llmctl {
    if ([System.Runtime.InteropServices.RuntimeInformation]::OSArchitecture -ne 'X64') {
        throw 'llmctl: a release for Windows is built for x86-64 only'
    }
    $releases = 'https://github.com/llmctl/llmctl/releases'
    $base = if ($env:LLMCTL_VERSION) { "$releases/download/v$($env:LLMCTL_VERSION -replace '^v', '')" } else { "$releases/latest/download" }
    $folder = if ($env:LLMCTL_INSTALL_DIR) { $env:LLMCTL_INSTALL_DIR } else { Join-Path $env:LOCALAPPDATA 'llmctl' }
    $name = 'llmctl-x86_64-pc-windows-msvc'
    $scratch = Join-Path ([System.IO.Path]::GetTempPath()) ([System.Guid]::NewGuid())
    New-Item -ItemType Directory $scratch | Out-Null
    try {
        $archive = Join-Path $scratch "$name.zip"
        Invoke-WebRequest -UseBasicParsing "$base/SHA256SUMS" -OutFile (Join-Path $scratch 'SHA256SUMS')
        Invoke-WebRequest -UseBasicParsing "$base/$name.zip" -OutFile $archive
        $line = Get-Content (Join-Path $scratch 'SHA256SUMS') | Where-Object { $_ -match "\s$([regex]::Escape("$name.zip"))$" }
        if (-not $line) { throw "llmctl: $base has no $name.zip" }
        $expected = ($line -split '\s+')[0]
        $actual = (Get-FileHash -Algorithm SHA256 $archive).Hash
        if ($actual -ne $expected) { throw "llmctl: $name.zip has the SHA-256 $actual instead of $expected; nothing was installed" }
        Expand-Archive $archive $scratch
        New-Item -ItemType Directory -Force $folder | Out-Null
        Copy-Item -Force (Join-Path $scratch "$name\llmctl.exe") $folder
    } finally {
        Remove-Item -Recurse -Force $scratch
    }
    "$(& (Join-Path $folder 'llmctl.exe') --version) is in $folder"
    if (($env:PATH -split ';') -notcontains $folder) { "add the folder to PATH: `$env:PATH = `"$folder;`$env:PATH`"" }
    'next: llmctl chat'
}

Install-Llmctl
